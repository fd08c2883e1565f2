"""Attacks on the activator: on its token issuer, its hot restart, its TLS, its idempotency keys and its replicas."""

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
QUEUED: Final = 150  # more than the concurrent streams of two replicas
PLATEAU_BYTES: Final = 16 * MIB


@contextmanager
def _issuer(scratch: Path, signer: Signer) -> Iterator[KeyServer]:
    """A token issuer in its own thread."""
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
class Ground:
    """An installation that accepts API keys and the tokens of a test issuer."""

    up: Installation
    issuer: KeyServer
    signer: Signer
    settings: Path  # the file of issuers

    @property
    def tenant(self) -> Tenant:
        """The tenant whose requests must always be answered."""
        return default_tenant(self.up)

    def with_token(self, scratch: Path, kid: str | None = None) -> int:
        """Return the status of a request that shows a token."""
        signer = self.signer if kid is None else Signer(kid)
        place = scratch / "token"
        place.write_text(signer.token(claims(time.time())))
        return ask(self.up, "GET", "/v1/models", place).status

    def pid(self) -> int:
        return services(self.up)["activator"].pid


@pytest.fixture(scope="module")
def ground(scratch: Path, tiny: Path) -> Iterator[Ground]:
    """`kelvin up` with an issuer and one ready model."""
    signer = Signer("one")
    with _issuer(scratch / "idp", signer) as issuer:
        file = issuer.file(scratch / "issuers.toml", 'scopes = ["infer"]\nrefresh_s = 10\n')
        with running_installation(scratch / "ground", settings={**SETTINGS, "KELVIN_OIDC": str(file)}) as up:
            up.push(tiny, "m")
            up.admin.request("PUT", "/admin/v1/models/m/scale", {"max": 1})
            yield Ground(up, issuer, signer, file)


def _to_zero(ground: Ground) -> None:
    """Scale the model to zero. A 503 is asked again."""

    def is_at_zero() -> bool:
        stopped = ask(ground.up, "POST", "/admin/v1/models/m/stop", ground.tenant.admin)
        found = ask(ground.up, "GET", "/admin/v1/models/m", ground.tenant.admin)
        if 503 in (stopped.status, found.status):
            return False
        return not any(version["replicas"] for version in found.json["versions"])

    wait(is_at_zero, "the model is at zero")


def _restart(ground: Ground) -> tuple[int, str, str]:
    return run_command(ground.up.data, "restart", "activator")


def _others(ground: Ground, before: int) -> list[psutil.Process]:
    """Return the activators other than the process `before`."""
    children = supervisor(ground.up).children()
    return [child for child in children if child.pid != before and command(child)[-1:] == ["activator"]]


def test_nested_key_set(ground: Ground, scratch: Path) -> None:
    """An issuer that answers with 100,000 nested lists does no harm: API keys and known tokens are still accepted.
    The activator stays the same process, and takes the next sound key set.
    """
    assert ground.with_token(scratch) == 200
    before, asked = ground.pid(), ground.issuer.asked
    with Bystander(lambda: ground.tenant.complete()) as bystander:
        ground.issuer.body = NESTED
        try:
            assert ground.with_token(scratch, "stranger") != 200  # names an unknown key, so that the key set is fetched
            wait(lambda: ground.issuer.asked > asked, "the key set is fetched")
            bystander.wait_for(5)
            assert ground.with_token(scratch) == 200
        finally:
            ground.issuer.body = None
    assert bystander.failures == []
    assert ground.pid() == before
    asked = ground.issuer.asked
    wait(lambda: ground.issuer.asked > asked, "the key set is fetched again")
    assert ground.with_token(scratch) == 200
    assert ground.pid() == before


def test_door_change_that_fails(ground: Ground) -> None:
    """A hot restart that fails leaves the old activator serving, and the command says why.
    Two failures: the new activator can't read a setting, or is killed while it starts. The next restart succeeds.
    """
    good = ground.settings.read_text()
    before = ground.pid()
    with Bystander(lambda: ground.tenant.complete()) as bystander:
        ground.settings.write_text("[[issuer]]\nissuer = 3\n")
        try:
            said = failure_text(*_restart(ground))
        finally:
            ground.settings.write_text(good)
        assert said.strip()
        bystander.wait_for(3)
        assert ground.pid() == before
    assert bystander.failures == []
    _to_zero(ground)
    assert ground.tenant.complete().status == 200, "the old activator starts no model any more"

    killed: list[int] = []

    def kill_new_activator() -> None:
        def is_killed() -> bool:
            for new in _others(ground, before):
                with suppress(psutil.NoSuchProcess):
                    new.kill()
                    killed.append(new.pid)
            return bool(killed)

        wait(is_killed, "a new activator starts")

    with Bystander(lambda: ground.tenant.complete()) as bystander:
        (code, out, err), _ = all_at_once(lambda: _restart(ground), kill_new_activator)
        assert "Traceback" not in out + err, out + err
        bystander.wait_for(3)
    assert bystander.failures == []
    _to_zero(ground)
    assert ground.tenant.complete().status == 200, f"after {code} {out} {err} no model is started"

    now = ground.pid()
    with Bystander(lambda: ground.tenant.complete()) as bystander:
        code, out, err = _restart(ground)
        assert code == 0, out + err
    assert bystander.failures == []
    assert ground.pid() != now
    _to_zero(ground)
    assert ground.tenant.complete().status == 200


@pytest.fixture
def payer(ground: Ground, scratch: Path, tiny: Path) -> Tenant:
    """A tenant with a model and no requests on its bill."""
    tenant = make_tenant(ground.up, f"payer-{time.time_ns()}", scratch)
    assert tenant.push(tiny)["exit"] == 0
    return tenant


def _paid(tenant: Tenant) -> int:
    """Return the number of successful requests on the tenant's bill."""
    found: int = tenant.report()["requests"].get("ok", 0)
    return found


def _ask_across_restart(ground: Ground, payer: Tenant) -> list[Answer]:
    """Return the answers to one idempotency key, sent before, during and after a hot restart of the activator."""
    body = {"model": "m", "prompt": "w1 w2", "max_tokens": 600, "temperature": 0}
    key = {"idempotency-key": f"once-{time.time_ns()}"}
    before = ground.pid()

    def repeat() -> Answer:
        """Send the request again while it gets 409, after the time in `Retry-After`."""
        limit = time.monotonic() + 60
        while (answer := payer.post("/v1/completions", body, key)).status == 409:
            assert time.monotonic() < limit, "its hints lead nowhere"
            time.sleep(float(answer.headers["retry-after"]))
        return answer

    def change() -> tuple[int, str, str]:
        wait(lambda: metric(ground.up, "kelvin_keyed_runs{") > 0, "the first request runs")
        return _restart(ground)

    def later() -> Answer:
        wait(lambda: _others(ground, before), "a new activator starts")
        return repeat()

    first, changed, second = all_at_once(repeat, change, later)
    assert changed[0] == 0, changed
    answers = [first, second, repeat()]
    assert [each.status for each in answers] == [200] * 3
    return answers


def test_idempotency_key_across_a_door_change_is_charged_once(ground: Ground, payer: Tenant) -> None:
    """One idempotency key used before, during and after a hot restart is one request on the bill."""
    _ask_across_restart(ground, payer)
    wait(lambda: _paid(payer) > 0, "the run is on the bill")
    # Records reach the bill in the order in which an activator writes them, so a second charge would precede this one.
    later = payer.complete()
    wait(lambda: is_recorded(ground.up, later.headers["x-request-id"]), "a later request is on the bill")
    assert _paid(payer) == 2


def test_idempotency_key_across_a_door_change_runs_once(ground: Ground, payer: Tenant) -> None:
    """One idempotency key used before, during and after a hot restart gets the bytes of one run."""
    assert len({each.raw for each in _ask_across_restart(ground, payer)}) == 1


def _hello() -> bytes:
    """Return a complete TLS client hello."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def _abort(port: int, hello: bytes, *, is_answered: bool) -> None:
    """Reset a connection during its handshake: at once, or after the server's first byte."""
    with suppress(OSError), closing(socket.create_connection(("localhost", port), timeout=10)) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        plain.sendall(hello)
        if is_answered:
            plain.recv(1)


def test_aborted_handshakes(ground: Ground) -> None:
    """Thousands of aborted TLS handshakes leave a bystander served, and the second half adds no memory.
    Half are cut within the client hello, half after the server's answer.
    """

    def storm() -> int:
        with ThreadPoolExecutor(16) as pool:
            for is_answered in (False, True):
                attack = partial(_abort, ground.up.port, whole if is_answered else whole[:126], is_answered=is_answered)
                for each in [pool.submit(attack) for _ in range(ABORTS // 2)]:
                    each.result()
        return anonymous_bytes(ground.pid())

    whole, before = _hello(), ground.pid()
    with Bystander(lambda: ground.tenant.complete()) as bystander:
        first = storm()
        second = storm()
    assert bystander.failures == []
    assert ground.pid() == before
    assert second - first < PLATEAU_BYTES, f"{first >> 20} MiB, then {second >> 20} MiB"


@pytest.mark.parametrize("service", ["activator", "controlplane", "weightcache", "zygote"])
def test_killed_while_a_model_is_at_zero(ground: Ground, service: str) -> None:
    """A process that a start needs is killed just before a request at zero, three times. The request is answered."""
    for _ in range(3):
        _to_zero(ground)
        found = services(ground.up)
        for name, process in found.items():
            if name.endswith(service):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        assert any(name.endswith(service) for name in found), found
        assert ground.tenant.complete().status == 200


@pytest.mark.parametrize("killed", [1, 2], ids=["one of two", "both"])
def test_replicas_killed_while_requests_queue(ground: Ground, payer: Tenant, killed: int) -> None:
    """When replicas are killed under a queue, each request is answered or fails with the loss, and is billed once.
    One or both of two replicas are killed, twice. The activator survives, and the same requests then all succeed.
    """
    _to_zero(ground)  # both replicas need free device slots
    path = "/admin/v1/models/m/scale"
    code, out, err = default_tenant(ground.up).kelvin("tenants", "set", payer.name, "--weight", "1000")
    assert code == 0, out + err  # its share of the device slots must hold two replicas, also beside other tenants
    wait(lambda: ask(ground.up, "PUT", path, payer.admin, {"min": 2, "max": 2}).status == 200, "it has a minimum")
    wait(lambda: len(_replicas(payer)) == 2, "two replicas are ready")
    before = ground.pid()
    jobs = [lambda n=n: payer.complete(f"w{n % 60}", max_tokens=48) for n in range(QUEUED)]

    def kill() -> None:
        for _ in range(2):
            wait(lambda: len(_replicas(payer)) == 2, "two replicas serve")
            _kill_replicas(payer, killed)

    *answers, _ = all_at_once(*jobs, kill)
    refused = [answer for answer in answers if answer.status != 200]
    assert {answer.json["error"]["code"] for answer in refused} <= {"replica_lost", "breaker_open", "start_failed"}
    assert ground.pid() == before
    wait(lambda: payer.complete().status == 200, "it serves again")
    again = all_at_once(*jobs)
    assert [answer.raw for answer in again if answer.status != 200] == []
    assert ground.pid() == before
    answered = len(answers) - len(refused) + QUEUED + 1
    wait(lambda: _paid(payer) >= answered, "all are on the bill")
    assert _paid(payer) == answered
    ask(ground.up, "PUT", path, payer.admin, {"min": 0, "max": 1})
    ask(ground.up, "POST", "/admin/v1/models/m/stop", payer.admin)


def _listener_pid(path: Path) -> int:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:  # no process listens
            return 0
        pid: int = struct.unpack("iII", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid


class Impostor:
    """Takes over a replica's socket and sends the same wrong answer to each request."""

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
        with suppress(OSError):  # `accept` fails once the listener is shut down
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
def test_another_server_in_place_of_a_replica(ground: Ground, payer: Tenant, answer: bytes) -> None:
    """Requests sent to a foreign server on a dead replica's socket are answered by the other replica.
    The control plane is stopped, so that the activator is not told of the death.
    """
    path = "/admin/v1/models/m/scale"
    code, out, err = default_tenant(ground.up).kelvin("tenants", "set", payer.name, "--weight", "1000")
    assert code == 0, out + err  # its share of the device slots must hold two replicas, also beside other tenants
    wait(lambda: ask(ground.up, "PUT", path, payer.admin, {"min": 2, "max": 2}).status == 200, "it has a minimum")
    wait(lambda: len(_replicas(payer)) == 2, "two replicas are ready")
    pid = _replicas(payer)[0]
    (place,) = [path for path in (ground.up.data / "run").glob("rt-*.sock") if _listener_pid(path) == pid]
    controlplane = services(ground.up)["controlplane"]
    controlplane.suspend()
    try:
        os.kill(pid, signal.SIGKILL)
        with Impostor(place, answer) as impostor:
            answers = all_at_once(*[lambda n=n: payer.complete(f"w{n}", max_tokens=4) for n in range(16)])
        assert impostor.asked, "no request reached the impostor"
    finally:
        controlplane.resume()
    assert [found.raw for found in answers if found.status != 200] == []
    wait(lambda: payer.complete().status == 200, "it serves again")
    # The control plane was suspended while the requests ran, so it may have been restarted.
    wait(lambda: ask(ground.up, "PUT", path, payer.admin, {"min": 0, "max": 1}).status == 200, "it has no minimum")
    wait(lambda: ask(ground.up, "POST", "/admin/v1/models/m/stop", payer.admin).status < 300, "it is stopped")
    wait(lambda: not _replicas(payer), "its slots are free for the next attack")


def _kill_replicas(tenant: Tenant, count: int) -> None:
    """Kill this many replicas at once, and wait until the control plane has noticed."""
    pids = _replicas(tenant)[:count]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait(lambda: not set(pids) & set(_replicas(tenant)), "their deaths are noticed")


def _replicas(tenant: Tenant) -> list[int]:
    answer = ask(tenant.up, "GET", "/admin/v1/models/m", tenant.admin)
    rows = [row for version in answer.json.get("versions", []) for row in version["replicas"]]
    return [row["pid"] for row in rows if row["state"] == "ready"]
