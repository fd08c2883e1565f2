"""Activator, snapshotter, and control plane with runtimes at three addresses, connected by mutual TLS.

Certificates and authorities are replaced while requests run.
"""

import contextlib
import http.client
import json
import shutil
import signal
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from coldstart_bench.harness.installation import Installation, free_port, running_installation
from kelvin.contracts.roles import Role
from kelvin.crypto.trust_roots import PUBLIC_FILE, SECRET_FILE
from tests.e2e.commands import run_to_end
from tests.e2e.conftest import SETTINGS
from tests.e2e.installation_processes import service, services
from tests.e2e.installation_state import is_recorded, log_lines
from tests.kelvin.crypto.pki import Authority, write

pytestmark = pytest.mark.deep

HERE, THERE, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"
ROLES = (Role.CONTROLPLANE, Role.SNAPSHOTTER, Role.RUNTIME, Role.ACTIVATOR)
ONE, TWO = Authority("one"), Authority("two")
READ_AGAIN = "the certificate was reloaded"
BODY = {"model": "llama", "prompt": "w1 w2", "max_tokens": 3, "temperature": 0}


@dataclass
class Elsewhere:
    """The activator's process and address, and the API key."""

    data: Path
    port: int
    key: str
    process: "subprocess.Popen[bytes]"

    def ask(self, method: str, path: str, body: object = None, key: str | None = None) -> tuple[int, bytes, str]:
        """Return status, body and request id, over a new connection."""
        tls = ssl.create_default_context(cafile=str(self.data / "ca.pem"))
        tls.check_hostname = False  # the certificate is for localhost
        with contextlib.closing(http.client.HTTPSConnection(HERE, self.port, context=tls, timeout=120)) as there:
            headers = {"authorization": f"Bearer {key or self.key}", "content-type": "application/json"}
            there.request(method, path, None if body is None else json.dumps(body), headers)
            answer = there.getresponse()
            return answer.status, answer.read(), answer.headers["x-request-id"]

    def is_ready(self) -> bool:
        """Return whether it answers and knows the model."""
        assert self.process.poll() is None, (self.data / "log").read_text()
        with contextlib.suppress(OSError):
            return self.ask("GET", "/v1/models/llama")[0] == 200
        return False


def _reread(data: Path) -> int:
    """Return how often a process reloaded its certificate."""
    return (data / "log").read_text().count(READ_AGAIN)


def _certify(inner: Path, of: Authority, *bundle: Authority) -> None:
    for role in ROLES:
        write(inner / role, of.of(role), *bundle)


def _settings(data: Path, inner: Path, **more: str) -> dict[str, str]:
    return {**SETTINGS, "KELVIN_DATA": str(data), "KELVIN_INNER_TLS": str(inner), **more}


@contextlib.contextmanager
def _process(module: str, settings: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with its own data directory, as on its own host. It must exit with 0."""
    with service(Path(settings["KELVIN_DATA"], "log"), settings, module) as process:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def inner(scratch: Path) -> Path:
    """Certificates of every role."""
    place = scratch / "inner"
    _certify(place, ONE, ONE)
    return place


@pytest.fixture(scope="module")
def places() -> dict[str, str]:
    """The addresses of control plane and snapshotter for the activator."""
    return {
        "KELVIN_CONTROL": f"https://{THERE}:{free_port()}",
        "KELVIN_SNAPSHOTTER": f"https://{THIRD}:{free_port()}",
    }


@pytest.fixture(scope="module")
def kelvin(scratch: Path, llama: Path, inner: Path, places: dict[str, str]) -> Iterator[Installation]:
    """The installation with the control plane and the runtimes."""
    settings = {
        **SETTINGS,
        "KELVIN_INNER_TLS": str(inner),
        "KELVIN_CONTROL_LISTEN": places["KELVIN_CONTROL"].removeprefix("https://"),
        "KELVIN_RUNTIME_LISTEN": f"{THERE}:0",
    }
    with running_installation(scratch / "there", settings=settings) as installation:
        installation.push(llama, "llama")
        installation.admin.request("PUT", "/admin/v1/models/llama/scale", {"max": 1})
        yield installation


@pytest.fixture(scope="module")
def snapshotter(kelvin: Installation, scratch: Path, inner: Path, places: dict[str, str]) -> Iterator[Path]:
    """The data directory of a snapshotter of the same installation, with its store and signing key."""
    data = scratch / "third"
    data.mkdir()
    for name in (SECRET_FILE, PUBLIC_FILE):
        shutil.copy2(kelvin.data / name, data / name)
    listen = places["KELVIN_SNAPSHOTTER"].removeprefix("https://")
    settings = _settings(
        data, inner, KELVIN_CONTROL=places["KELVIN_CONTROL"], KELVIN_SNAPSHOTTER_LISTEN=listen,
        KELVIN_STORE=(kelvin.data / "store").as_uri(),
    )  # fmt: skip
    with _process("snapshotter", settings):
        kelvin.wait((data / "run" / "snapshotter.sock").exists, "the snapshotter listens")
        yield data


@pytest.fixture(scope="module")
def elsewhere(
    kelvin: Installation, snapshotter: Path, scratch: Path, inner: Path, places: dict[str, str]
) -> Iterator[Elsewhere]:
    """An activator at its own address."""
    data, port = scratch / "here", free_port()
    data.mkdir()
    settings = _settings(data, inner, **places, KELVIN_HOST="0.0.0.0", KELVIN_PORT=str(port))
    with _process("activator", settings) as process:
        found = Elsewhere(data, port, (kelvin.data / "default.key").read_text().strip(), process)
        kelvin.wait(found.is_ready, "the activator elsewhere knows the model")
        yield found


def test_a_version_at_zero_is_woken_from_another_host(kelvin: Installation, elsewhere: Elsewhere) -> None:
    """A request through the other host's activator starts the model and is recorded."""
    kelvin.scale_to_zero("llama")
    status, raw, request_id = elsewhere.ask("POST", "/v1/completions", BODY)
    assert status == 200, raw
    assert json.loads(raw)["usage"]["completion_tokens"] == 3
    kelvin.wait(lambda: is_recorded(kelvin, request_id), "the record is in the ledger")
    assert kelvin.client.request("POST", "/v1/completions", BODY)["choices"] == json.loads(raw)["choices"]
    assert not [line for line in log_lines(kelvin) if "activator lost" in line["message"]]  # though its spool is away


def test_a_model_is_pushed_from_another_host(kelvin: Installation, elsewhere: Elsewhere, qwen2: Path) -> None:
    """A push through the activator reaches the snapshotter, which asks the control plane for gate and seal."""
    door = ["--url", f"https://localhost:{elsewhere.port}", "--ca", str(elsewhere.data / "ca.pem")]
    key = ["--key", str(kelvin.data / "admin.key")]
    status, _, err = run_to_end("push", str(qwen2), "--name", "pushed", *door, *key)
    assert status == 0, err
    kelvin.wait(lambda: elsewhere.ask("GET", "/v1/models/pushed")[0] == 200, "the activator elsewhere knows it")
    status, raw, _ = elsewhere.ask("POST", "/v1/completions", BODY | {"model": "pushed"})
    assert status == 200, raw


def test_requests_go_on_while_the_control_plane_is_replaced(kelvin: Installation, elsewhere: Elsewhere) -> None:
    """While the control plane is killed and replaced, a ready model serves, and the records arrive later."""
    elsewhere.ask("POST", "/v1/completions", BODY)
    before = services(kelvin)["controlplane"]
    before.kill()
    answers = [elsewhere.ask("POST", "/v1/completions", BODY) for _ in range(5)]
    assert [status for status, _, _ in answers] == [200] * 5
    kelvin.wait(lambda: all(is_recorded(kelvin, name) for *_, name in answers), "the records are in the ledger")
    assert services(kelvin)["controlplane"].pid != before.pid


def test_admin_and_push_routes_work_between_hosts(kelvin: Installation, elsewhere: Elsewhere) -> None:
    """Admin and push routes work through the activator, for keys with the scope."""
    admin = (kelvin.data / "admin.key").read_text().strip()
    assert elsewhere.ask("GET", "/admin/v1/models", key=admin)[0] == 200
    status, raw, _ = elsewhere.ask("POST", "/push/v1/fsck", key=admin)
    assert status == 200, raw
    assert elsewhere.ask("GET", "/admin/v1/models")[0] == 403


def test_certificates_change_while_requests_run(
    kelvin: Installation, elsewhere: Elsewhere, snapshotter: Path, inner: Path
) -> None:
    """No request fails while certificates move from one authority to another."""
    stop, statuses = threading.Event(), list[int]()

    def load() -> None:
        while not stop.is_set():
            statuses.append(elsewhere.ask("POST", "/v1/completions", BODY)[0])

    def reread() -> dict[str, int]:
        lines = [line["message"] for line in log_lines(kelvin, "controlplane")]
        return {"here": _reread(elsewhere.data), "third": _reread(snapshotter), "there": lines.count(READ_AGAIN)}

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for of, bundle in ((ONE, (ONE, TWO)), (TWO, (ONE, TWO)), (TWO, (TWO,))):
            before, asked = reread(), len(statuses)
            _certify(inner, of, *bundle)
            kelvin.wait(
                lambda before=before: all(now > before[name] for name, now in reread().items()),  # type: ignore[misc]
                "all have read it",
            )
            kelvin.wait(lambda asked=asked: len(statuses) > asked + 5, "requests ran since")  # type: ignore[misc]
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert set(statuses) == {200}
    kelvin.scale_to_zero("llama")  # the next request needs new connections
    assert elsewhere.ask("POST", "/v1/completions", BODY)[0] == 200


def test_another_roles_certificate_starts_no_activator(scratch: Path, inner: Path, places: dict[str, str]) -> None:
    """An activator with the certificate of another role exits at once and names the setting."""
    log = scratch / "none.log"
    with service(log, _settings(scratch / "none", inner / Role.RUNTIME, **places), "activator") as process:
        assert process.wait(60) == 2
    assert "KELVIN_INNER_TLS=" in log.read_text()
    assert "is for the role runtime, not spiffe://kelvin/activator" in log.read_text()
