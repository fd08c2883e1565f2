"""`kelvin up` for its operator: one ready line, one process per directory, restarts, and clean exits."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coldstart_bench.harness.installation import (
    Installation,
    InstallationFailed,
    KelvinUpProcess,
    free_port,
    running_installation,
)
from tests.e2e.conftest import SETTINGS
from tests.e2e.https_client import complete, connect, headers
from tests.e2e.installation_processes import command, refused_start, services
from tests.e2e.installation_state import bill, replicas, sole_replica
from tests.e2e.tiny_models import make_tiny
from tests.unclean_exit import find_unclean_exit

ROOT = Path(__file__).parents[3]
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
AWAY = (InstallationFailed, OSError, http.client.HTTPException)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a path longer than a socket address may be."""
    return tmp_path_factory.mktemp("up") / ("long-" * 24) / "data"


@pytest.fixture(scope="module")
def hurt(place: Path) -> Iterator[Installation]:
    """An installation that tests may damage."""
    book = place.parent / "prices.toml"
    book.parent.mkdir(parents=True)
    book.write_text((ROOT / "controlplane" / "price_book.toml").read_text().replace('"USD"', '"EUR"'))
    settings = {**SETTINGS, "KELVIN_PRICE_BOOK": str(book), "KELVIN_CHUNK_BYTES": str(64 << 10)}
    with running_installation(place, settings=settings) as installation:
        installation.push(make_tiny(place.parent / "model", "llama", seed=3), "m")
        installation.admin.request("PUT", "/admin/v1/models/m/scale", {"max": 1})
        yield installation


@pytest.fixture
def up(hurt: Installation) -> Installation:
    """The installation, once every process that an earlier test killed is ready again."""

    def is_whole() -> bool:
        try:
            found = hurt.admin.request("GET", "/admin/v1/status")
        except AWAY:
            return False
        return all(row["healthy"] and row["ready"] for row in found["processes"])

    hurt.wait(is_whole, "every process is ready")
    return hurt


def _running(up: Installation, module: str, other_than: int | None = None) -> psutil.Process:
    """Return the process once it runs."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [p for name, p in services(up).items() if name == module and p.pid != other_than]
        return bool(found)

    up.wait(is_there, f"{module} runs")
    return found[0]


def test_keys_are_private_and_written_once(up: Installation) -> None:
    """Key files are readable by their owner only, and the database contains no secret."""
    for name in ("admin.key", "default.key"):
        path = up.data / name
        assert path.stat().st_mode & 0o777 == 0o600
        secret = path.read_text().strip().encode()
        for stored in up.data.glob("kelvin.db*"):
            with contextlib.suppress(FileNotFoundError):  # a temporary journal of the database
                assert secret not in stored.read_bytes()


def test_the_price_book_is_the_operators(up: Installation) -> None:
    assert bill(up)["currency"] == "EUR"


def test_a_second_up_on_the_same_directory_says_so(up: Installation) -> None:
    """A second `kelvin up` on a directory fails and names it, and the first one serves on."""
    assert "is in use by process" in refused_start(up.data)
    assert complete(up, "m", "w1 w2", max_tokens=2).status == 200


@pytest.mark.deep
def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    """A used port is reported with setting, value and rule, and no process is left."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        said = refused_start(tmp_path / "data", port=port)
    assert f"activator can't start: KELVIN_PORT={port}: 127.0.0.1 refuses it: Address already in use" in said
    assert "Traceback" not in said
    assert not any(str(tmp_path) in command(process) for process in psutil.Process().children())


@pytest.mark.parametrize("module", ["runtime.app.zygote", "weightcache", "controlplane", "snapshotter", "activator"])
def test_a_killed_process_comes_back(up: Installation, module: str) -> None:
    """After each process is killed, it is restarted and a request succeeds."""
    victim = _running(up, module)
    victim.kill()
    _running(up, module, other_than=victim.pid)

    def served() -> bool:
        try:
            return complete(up, "m", "w1 w2", max_tokens=2).status == 200
        except AWAY:  # the activator itself was killed
            return False

    up.wait(served, "a request is answered")


@pytest.mark.deep
def test_push_outlives_activator_and_snapshotter(up: Installation, tmp_path: Path) -> None:
    """A push goes on while the snapshotter and then the activator are killed, and prints no error."""
    directory = make_tiny(tmp_path / "model", "llama", seed=8, layers=4)
    command = [sys.executable, "-m", "kelvin.cli.main", "push", str(directory), "--name", "m", "--data", str(up.data)]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "--limit-rate", "128K", "--json"], stdout=pipe, stderr=pipe, text=True) as pusher:
        try:
            for module in ("snapshotter", "activator"):
                _wait_for_a_chunk(up)
                assert pusher.poll() is None, pusher.communicate()
                _running(up, module).kill()
            out, err = pusher.communicate(timeout=120)
        finally:
            pusher.kill()
    assert (pusher.returncode, err) == (0, ""), out
    assert json.loads(out)["created"]


def _wait_for_a_chunk(up: Installation) -> None:
    """Wait until one more chunk is staged."""
    had = _staged(up)
    up.wait(lambda: _staged(up) > had, "a chunk is staged")


def _staged(up: Installation) -> int:
    """Return the number of chunks of open pushes."""
    pushes = (up.data / "staging" / "default").glob("*/declared.json")
    return sum(len(list((push.parent / "chunks").glob("[!.]*"))) for push in pushes)


def test_a_restarted_control_plane_adopts_what_runs(up: Installation) -> None:
    """The same runtime serves before and after the control plane is killed."""
    assert complete(up, "m", "w1 w2", max_tokens=2).status == 200
    before = [sole_replica(up, "m")["runtime_id"]]
    _running(up, "controlplane").kill()
    assert complete(up, "m", "w1 w2", max_tokens=2).status == 200

    def adopted() -> bool:
        try:
            return [replica["runtime_id"] for replica in replicas(up, "m")] == before
        except AWAY:  # the control plane is not back yet
            return False

    up.wait(adopted, "the runtime is adopted")


@pytest.mark.deep
def test_fatal_setting_is_reported_at_once(tmp_path: Path) -> None:
    """A bad setting is reported with its value and rule, without waiting for the ready timeout."""
    said = refused_start(tmp_path / "data", {**SETTINGS, "KELVIN_KV_BYTES": "1"})
    assert "controlplane can't start: KELVIN_KV_BYTES=1: must be 67108864 or more" in said


@pytest.mark.deep
def test_a_process_that_is_not_ready_in_time_is_named(tmp_path: Path) -> None:
    """The message names the slow process and the setting that allows more time."""
    said = refused_start(tmp_path / "data", {**SETTINGS, "KELVIN_READY_S": "1"})
    assert "zygote is not ready after 1 s; KELVIN_READY_S gives it longer" in said


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a model, of an installation that has ended."""
    directory = tmp_path_factory.mktemp("ends")
    with running_installation(directory / "data", settings=SETTINGS) as kelvin:
        kelvin.push(make_tiny(directory / "model", "llama", seed=3), "m")
    return directory / "data"


@pytest.mark.parametrize(
    ("number", "is_asked"),
    [
        pytest.param(signal.SIGTERM, False, id="SIGTERM, idle"),
        *(pytest.param(number, True, id=f"{number.name}, under a stream") for number in ENDS),
    ],
)
def test_the_end_of_the_supervisor_leaves_nothing(ends: Path, number: signal.Signals, is_asked: bool) -> None:
    """After each signal no process is left, no log has a traceback, and the exit code is right."""
    port = free_port()
    with KelvinUpProcess(ends, port, SETTINGS) as process, contextlib.ExitStack() as stack:
        assert process.ready_line().startswith("kelvin is ready: url=https://localhost:"), process.error_output()
        if is_asked:
            kelvin = Installation(ends, port, process.pid)
            stack.callback((streaming := connect(kelvin)).close)
            body = {"model": "m", "prompt": "w1 w2", "max_tokens": 3000, "stream": True}
            streaming.request("POST", "/v1/completions", json.dumps(body), headers(kelvin))
            answer = streaming.getresponse()
            assert answer.status == 200
            assert any(line.startswith(b"data: ") for line in answer), (
                "no token came"
            )  # the first events may be heartbeats
            stack.enter_context(reading(answer))
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 5
        process.send(number)
        assert process.wait_exit() == (-9 if number is signal.SIGKILL else 0)
        _, alive = psutil.wait_procs(family, timeout=60)
        assert alive == []
        logs = [process.error_output(), *(path.read_text() for path in (ends / "logs").glob("*.log"))]
    assert len(logs) > 5
    assert [line for log in logs for line in find_unclean_exit(log)] == []


@contextlib.contextmanager
def reading(answer: http.client.HTTPResponse) -> Iterator[None]:
    """Read the answer to its end in a thread. It may be cut."""

    def read() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer.read()

    reader = threading.Thread(target=read)
    reader.start()
    yield
    reader.join()
