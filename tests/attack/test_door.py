"""Attacks on the process that faces the world: its issuer, its replacement, its TLS, its idempotency keys."""

import asyncio
import os
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

import psutil
import pytest

from coldstart_bench.harness.installation import Installation, run_command, running_installation
from tests.activator.auth.token_issuer import KeyServer, Signer, claims, key_server
from tests.attack.attacker import MIB, SETTINGS, Bystander, anonymous_bytes, failure_text, metric
from tests.e2e.https_client import Answer, all_at_once, ask
from tests.e2e.installation_processes import command, services, supervisor
from tests.e2e.installation_state import is_recorded
from tests.e2e.tenants import Tenant, default_tenant, make_tenant
from tests.eventually import wait

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

NESTED: Final = b'{"keys":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
ABORTS: Final = 3000
QUEUED: Final = 150  # more than the streams of two replicas
PLATEAU_BYTES: Final = 16 * MIB


@contextmanager
def _issuer(scratch: Path, signer: Signer) -> Iterator[KeyServer]:
    """An issuer of tokens in a thread of its own."""
    loop, found, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    servers: list[KeyServer] = []

    async def serve() -> None:
        async with key_server(scratch, signer) as server:
            servers.append(server)
            found.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert found.wait(30)
        yield servers[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


@dataclass(frozen=True)
class Door:
    """An installation that takes keys and the tokens of an issuer of ours."""

    up: Installation
    issuer: KeyServer
    signer: Signer
    settings: Path  # its file of issuers

    @property
    def tenant(self) -> Tenant:
        """Whose requests must be answered all the time."""
        return default_tenant(self.up)

    def with_token(self, scratch: Path, kid: str | None = None) -> int:
        """The status of a request that shows a token."""
        signer = self.signer if kid is None else Signer(kid)
        place = scratch / "token"
        place.write_text(signer.token(claims(time.time())))
        return ask(self.up, "GET", "/v1/models", place).status

    def pid(self) -> int:
        """Of the activator."""
        return services(self.up)["activator"].pid


@pytest.fixture(scope="module")
def door(scratch: Path, tiny: Path) -> Iterator[Door]:
    """`kelvin up` with an issuer, whose one model is ready."""
    signer = Signer("one")
    with _issuer(scratch / "idp", signer) as issuer:
        file = issuer.file(scratch / "issuers.toml", 'scopes = ["infer"]\nrefresh_s = 10\n')
        with running_installation(scratch / "door", settings={**SETTINGS, "KELVIN_OIDC": str(file)}) as up:
            up.push(tiny, "m")
            up.admin.request("PUT", "/admin/v1/models/m/scale", {"max": 1})
            yield Door(up, issuer, signer, file)


def _to_zero(door: Door) -> None:
    """Take the model to zero; what is not there yet is asked again."""

    def is_at_zero() -> bool:
        stopped = ask(door.up, "POST", "/admin/v1/models/m/stop", door.tenant.admin)
        found = ask(door.up, "GET", "/admin/v1/models/m", door.tenant.admin)
        if 503 in (stopped.status, found.status):
            return False
        return not any(version["replicas"] for version in found.json["versions"])

    wait(is_at_zero, "the model is at zero")


def _restart(door: Door) -> tuple[int, str, str]:
    return run_command(door.up.data, "restart", "activator")


def _others(door: Door, before: int) -> list[psutil.Process]:
    """Return the activators beside the one that was there before."""
    children = supervisor(door.up).children()
    return [child for child in children if child.pid != before and command(child)[-1:] == ["activator"]]


def test_nested_key_set(door: Door, scratch: Path) -> None:
    """The issuer answers with a hundred thousand nested lists. Keys go on, the tokens of before as well, the activator
    is the same process; a key set that is sound again is taken.
    """
    assert door.with_token(scratch) == 200
    before, asked = door.pid(), door.issuer.asked
    with Bystander(lambda: door.tenant.complete()) as bystander:
        door.issuer.body = NESTED
        try:
            assert door.with_token(scratch, "stranger") != 200  # names a key that has to be looked for
            wait(lambda: door.issuer.asked > asked, "the key set is fetched")
            bystander.wait_for(5)
            assert door.with_token(scratch) == 200
        finally:
            door.issuer.body = None
    assert bystander.failures == []
    assert door.pid() == before
    asked = door.issuer.asked
    wait(lambda: door.issuer.asked > asked, "the key set is fetched again")
    assert door.with_token(scratch) == 200
    assert door.pid() == before


def test_door_change_that_fails(door: Door) -> None:
    """A new door that can't read a setting, and one that is killed while it starts: the command says so in a sentence,
    the old door starts models from zero as before. Then a change that goes well.
    """
    good = door.settings.read_text()
    before = door.pid()
    with Bystander(lambda: door.tenant.complete()) as bystander:
        door.settings.write_text("[[issuer]]\nissuer = 3\n")
        try:
            said = failure_text(*_restart(door))
        finally:
            door.settings.write_text(good)
        assert said.strip()
        bystander.wait_for(3)
        assert door.pid() == before
    assert bystander.failures == []
    _to_zero(door)
    assert door.tenant.complete().status == 200, "the old door wakes nobody any more"

    killed: list[int] = []

    def kill_the_new_one() -> None:
        def is_killed() -> bool:
            for new in _others(door, before):
                with suppress(psutil.NoSuchProcess):
                    new.kill()
                    killed.append(new.pid)
            return bool(killed)

        wait(is_killed, "a new door starts")

    with Bystander(lambda: door.tenant.complete()) as bystander:
        (code, out, err), _ = all_at_once(lambda: _restart(door), kill_the_new_one)
        assert "Traceback" not in out + err, out + err
        bystander.wait_for(3)
    assert bystander.failures == []
    _to_zero(door)
    assert door.tenant.complete().status == 200, f"after {code} {out} {err} nobody is woken"

    now = door.pid()
    with Bystander(lambda: door.tenant.complete()) as bystander:
        code, out, err = _restart(door)
        assert code == 0, out + err
    assert bystander.failures == []
    assert door.pid() != now
    _to_zero(door)
    assert door.tenant.complete().status == 200


@pytest.fixture
def payer(door: Door, scratch: Path, tiny: Path) -> Tenant:
    """A tenant on whose bill nothing is yet, with a model."""
    tenant = make_tenant(door.up, f"payer-{time.time_ns()}", scratch)
    assert tenant.push(tiny)["exit"] == 0
    return tenant


def _paid(tenant: Tenant) -> int:
    """Requests on its bill that went well."""
    found: int = tenant.report()["requests"].get("ok", 0)
    return found


def _ask_across_a_change(door: Door, payer: Tenant) -> list[Answer]:
    """Answers to one request with one key: begun before a planned change of the door, during it, and after it."""
    body = {"model": "m", "prompt": "w1 w2", "max_tokens": 600, "temperature": 0}
    key = {"idempotency-key": f"once-{time.time_ns()}"}
    before = door.pid()

    def repeat() -> Answer:
        """As a client does that has no answer yet: again, when it was told to come."""
        limit = time.monotonic() + 60
        while (answer := payer.post("/v1/completions", body, key)).status == 409:
            assert time.monotonic() < limit, "its hints lead nowhere"
            time.sleep(float(answer.headers["retry-after"]))
        return answer

    def change() -> tuple[int, str, str]:
        wait(lambda: metric(door.up, "kelvin_keyed_runs{") > 0, "the first request runs")
        return _restart(door)

    def later() -> Answer:
        wait(lambda: _others(door, before), "a new door starts")
        return repeat()

    first, changed, second = all_at_once(repeat, change, later)
    assert changed[0] == 0, changed
    answers = [first, second, repeat()]
    assert [each.status for each in answers] == [200] * 3
    return answers


def test_idempotency_key_across_a_door_change_is_charged_once(door: Door, payer: Tenant) -> None:
    """The same key before, during and after a planned change of the door: one request on the bill."""
    _ask_across_a_change(door, payer)
    wait(lambda: _paid(payer) > 0, "the run is on the bill")
    # Records reach the bill in the order in which a door writes them, so a second charge would come before this one.
    later = payer.complete()
    wait(lambda: is_recorded(door.up, later.headers["x-request-id"]), "a later request is on the bill")
    assert _paid(payer) == 2


def test_idempotency_key_across_a_door_change_runs_once(door: Door, payer: Tenant) -> None:
    """The same key before, during and after a planned change of the door: the answer of one run, byte for byte."""
    assert len({each.raw for each in _ask_across_a_change(door, payer)}) == 1


def _hello() -> bytes:
    """Return a whole hello, as any client begins."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def _abort(port: int, hello: bytes, *, is_answered: bool) -> None:
    """Begin a handshake and reset the connection in the middle of it: at once, or when the server has answered."""
    with suppress(OSError), closing(socket.create_connection(("localhost", port), timeout=10)) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        plain.sendall(hello)
        if is_answered:
            plain.recv(1)


def test_aborted_handshakes(door: Door) -> None:
    """Thousands of TLS handshakes that are reset, cut within the hello or after the server's answer. A bystander is
    answered; the second half takes no more memory than the first left.
    """

    def storm() -> int:
        with ThreadPoolExecutor(16) as pool:
            for is_answered in (False, True):
                attack = partial(_abort, door.up.port, whole if is_answered else whole[:126], is_answered=is_answered)
                for each in [pool.submit(attack) for _ in range(ABORTS // 2)]:
                    each.result()
        return anonymous_bytes(door.pid())

    whole, before = _hello(), door.pid()
    with Bystander(lambda: door.tenant.complete()) as bystander:
        first = storm()
        second = storm()
    assert bystander.failures == []
    assert door.pid() == before
    assert second - first < PLATEAU_BYTES, f"{first >> 20} MiB, then {second >> 20} MiB"


@pytest.mark.parametrize("service", ["activator", "controlplane", "weightcache", "zygote"])
def test_killed_while_a_model_is_at_zero(door: Door, service: str) -> None:
    """SIGKILL to what a start needs, three times, each just before the request that needs it: it is answered."""
    for _ in range(3):
        _to_zero(door)
        found = services(door.up)
        for name, process in found.items():
            if name.endswith(service):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        assert any(name.endswith(service) for name in found), found
        assert door.tenant.complete().status == 200


@pytest.mark.parametrize("killed", [1, 2], ids=["one of two", "both"])
def test_replicas_killed_while_requests_queue(door: Door, payer: Tenant, killed: int) -> None:
    """Two replicas and a queue behind them; one or both are killed at once, twice. Every request is answered, or lost
    with its replica by name; what is answered is on the bill once. The activator is the same process, and as many
    requests again find their slots.
    """
    _to_zero(door)  # there is room for both
    path = "/admin/v1/models/m/scale"
    code, out, err = default_tenant(door.up).kelvin("tenants", "set", payer.name, "--weight", "1000")
    assert code == 0, out + err  # so that its share of the device slots holds two replicas, whoever else has some
    wait(lambda: ask(door.up, "PUT", path, payer.admin, {"min": 2, "max": 2}).status == 200, "it has a minimum")
    wait(lambda: len(_replicas(payer)) == 2, "two replicas are ready")
    before = door.pid()
    jobs = [lambda n=n: payer.complete(f"w{n % 60}", max_tokens=48) for n in range(QUEUED)]

    def kill() -> None:
        for _ in range(2):
            wait(lambda: len(_replicas(payer)) == 2, "two replicas serve")
            _kill_replicas(payer, killed)

    *answers, _ = all_at_once(*jobs, kill)
    refused = [answer for answer in answers if answer.status != 200]
    assert {answer.json["error"]["code"] for answer in refused} <= {"replica_lost", "breaker_open", "start_failed"}
    assert door.pid() == before
    wait(lambda: payer.complete().status == 200, "it serves again")
    again = all_at_once(*jobs)
    assert [answer.raw for answer in again if answer.status != 200] == []
    assert door.pid() == before
    answered = len(answers) - len(refused) + QUEUED + 1
    wait(lambda: _paid(payer) >= answered, "all are on the bill")
    assert _paid(payer) == answered
    ask(door.up, "PUT", path, payer.admin, {"min": 0, "max": 1})
    ask(door.up, "POST", "/admin/v1/models/m/stop", payer.admin)


def _listener_pid(path: Path) -> int:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:  # nobody listens
            return 0
        pid: int = struct.unpack("iII", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid


class Impostor:
    """Takes the socket of a replica, and answers each request there as no runtime does."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self._path, self._answer = path, answer
        self.asked = 0

    def __enter__(self) -> Self:
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve, name="impostor")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        with suppress(OSError):  # it was shut down
            while True:
                with closing(self._listener.accept()[0]) as connection, suppress(OSError):
                    connection.settimeout(5)
                    self.asked += connection.recv(1 << 16).startswith(b"POST /v1/completions")
                    connection.sendall(self._answer)


_HTML: Final = b"HTTP/1.1 %s\r\ncontent-type: text/html\r\ncontent-length: 4\r\nconnection: close\r\n\r\ngone"
IMPOSTORS: Final = {
    "500": _HTML % b"500 Internal Server Error",
    "404": _HTML % b"404 Not Found",
    "200 without frames": _HTML % b"200 OK",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
}


@pytest.mark.parametrize("answer", IMPOSTORS.values(), ids=IMPOSTORS.keys())
def test_another_server_in_place_of_a_replica(door: Door, payer: Tenant, answer: bytes) -> None:
    """A replica's runtime is killed while the control plane is stopped, so nobody tells the activator, and another
    server listens on its socket. Each request is answered by the other replica, also those that were sent there.
    """
    path = "/admin/v1/models/m/scale"
    code, out, err = default_tenant(door.up).kelvin("tenants", "set", payer.name, "--weight", "1000")
    assert code == 0, out + err  # so that its share of the device slots holds two replicas, whoever else has some
    wait(lambda: ask(door.up, "PUT", path, payer.admin, {"min": 2, "max": 2}).status == 200, "it has a minimum")
    wait(lambda: len(_replicas(payer)) == 2, "two replicas are ready")
    pid = _replicas(payer)[0]
    (place,) = [path for path in (door.up.data / "run").glob("rt-*.sock") if _listener_pid(path) == pid]
    controlplane = services(door.up)["controlplane"]
    controlplane.suspend()
    try:
        os.kill(pid, signal.SIGKILL)
        with Impostor(place, answer) as impostor:
            answers = all_at_once(*[lambda n=n: payer.complete(f"w{n}", max_tokens=4) for n in range(16)])
        assert impostor.asked, "nobody was sent there"
    finally:
        controlplane.resume()
    assert [found.raw for found in answers if found.status != 200] == []
    wait(lambda: payer.complete().status == 200, "it serves again")
    # The control plane may have to start again: it was silent for as long as the answers took.
    wait(lambda: ask(door.up, "PUT", path, payer.admin, {"min": 0, "max": 1}).status == 200, "it has no minimum")
    wait(lambda: ask(door.up, "POST", "/admin/v1/models/m/stop", payer.admin).status < 300, "it is stopped")
    wait(lambda: not _replicas(payer), "its slots are free for the next attack")


def _kill_replicas(tenant: Tenant, count: int) -> None:
    """Kill so many at once, and wait until the control plane knows."""
    pids = _replicas(tenant)[:count]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait(lambda: not set(pids) & set(_replicas(tenant)), "their deaths are noticed")


def _replicas(tenant: Tenant) -> list[int]:
    answer = ask(tenant.up, "GET", "/admin/v1/models/m", tenant.admin)
    rows = [row for version in answer.json.get("versions", []) for row in version["replicas"]]
    return [row["pid"] for row in rows if row["state"] == "ready"]
