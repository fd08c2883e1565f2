"""The process itself: it serves, survives SIGKILL at any moment of a push, ends on SIGTERM and with its supervisor."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from kelvin.progress import Silence
from kelvin.push import Line, push_directory
from kelvin.push_calls import Patience
from service.unix import SocketDirectory
from snapshotter.app import CONTROL_SOCKET, SOCKET
from tests.snapshotter.control import FakeControlPlane
from tests.snapshotter.house import TENANT, principal, serving
from tests.snapshotter.models import Model, default_weights, weight
from tests.snapshotter.reader import assert_whole, read_version, versions_of
from tests.snapshotter.unix import unix_transport

# Short pauses: what is waited for is a process that starts.
PATIENT = Line(patience=Patience(give_up_s=60, first_s=60, base_s=0.02, cap_s=0.1))


class Process:
    """`python -m snapshotter` over a data directory, started again as often as it is killed."""

    def __init__(self, data: Path, directory: SocketDirectory) -> None:
        self.data = data
        self.directory = directory
        self.running: subprocess.Popen[bytes] | None = None
        self.lifeline = -1

    def start(self) -> None:
        mine, self.lifeline = os.pipe()
        env = {**os.environ, "KELVIN_DATA": str(self.data), "KELVIN_LIFELINE_FD": str(mine),
               "KELVIN_CHUNK_BYTES": "8192", "KELVIN_PACK_BYTES": "32768"}  # fmt: skip
        log = (self.data / "log").open("ab")
        self.running = subprocess.Popen([sys.executable, "-m", "snapshotter"], env=env, stderr=log, pass_fds=[mine])
        log.close()
        os.close(mine)

    def end(self, number: int) -> int:
        assert self.running is not None
        self.running.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        assert self.running is not None
        status = self.running.wait(30)
        self.close()
        return status

    def close(self) -> None:
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def client(self) -> httpx.Client:
        transport = unix_transport(self.directory.address(SOCKET))
        return httpx.Client(transport=transport, base_url="http://snapshotter", headers=principal(), timeout=60)


@contextmanager
def process_over(data: Path) -> Iterator[Process]:
    with ExitStack() as stack:
        directory = SocketDirectory(data / "run")
        stack.callback(directory.close)
        control = FakeControlPlane(data / "store")
        stack.enter_context(serving(control.app(), directory, CONTROL_SOCKET))
        process = Process(data, directory)
        process.start()
        try:
            yield process
        finally:
            if process.running is not None and process.running.poll() is None:
                process.end(signal.SIGKILL)
            process.close()


def many_chunks() -> Model:
    weights = default_weights() | {f"model.extra.{n}": weight((3000,), n) for n in range(20)}
    return Model(shards={"model.safetensors": weights})


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """SIGKILL while a client pushes, again and again: never a version in part; the client's own retries complete it."""
    model = many_chunks()
    directory = model.write(tmp_path / "model")
    with process_over(tmp_path / "data") as process, process.client() as client:
        done = threading.Event()
        found: list[object] = []

        def push() -> None:
            try:
                found.append(push_directory(directory, "toy", client, Silence(), PATIENT).committed)
            except BaseException as error:
                found.append(error)
            finally:
                done.set()

        pusher = threading.Thread(target=push)
        pusher.start()
        chance = random.Random(5)
        kills = 0
        while not done.wait(chance.uniform(0.0, 0.25)) and kills < 6:
            # From the first answer on, so that not every kill meets a process that only starts.
            with process.client() as asker:
                wait_until_healthy(asker, done)
            done.wait(chance.uniform(0.0, 0.1))
            assert process.end(signal.SIGKILL) == -signal.SIGKILL
            kills += 1
            assert_whole(tmp_path / "data" / "store", TENANT)
            process.start()
        pusher.join(60)
        assert not pusher.is_alive()
        assert kills
        (version,) = versions_of(tmp_path / "data" / "store", TENANT)
        assert getattr(found[0], "version", found[0]) == version
        _, tensors = read_version(tmp_path / "data" / "store", TENANT, version)
        assert tensors == {name: each.data for name, each in model.shards["model.safetensors"].items()}


def wait_until_healthy(client: httpx.Client, done: threading.Event) -> None:
    for _ in range(600):
        try:
            client.get("/healthz")
        except httpx.TransportError:
            if done.wait(0.05):
                return
        else:
            return
    pytest.fail("the snapshotter did not start")


def test_ends_as_told(tmp_path: Path) -> None:
    """SIGTERM: exit 0. The supervisor's end: it ends too."""
    never = threading.Event()
    with process_over(tmp_path) as process:
        with process.client() as client:
            wait_until_healthy(client, never)
            assert client.get("/readyz").status_code == 200
        assert process.end(signal.SIGTERM) == 0
        process.start()
        with process.client() as client:
            wait_until_healthy(client, never)
        process.close()
        assert process.running is not None
        assert process.running.wait(30) == 0
