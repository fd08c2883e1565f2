"""`python -m snapshotter` as a process that can be killed and restarted, beside a fake control plane."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from kelvin.ipc.socket_directory import SocketDirectory
from snapshotter.app.app import CONTROL_SOCKET, SOCKET
from tests.snapshotter.control import FakeControlPlane
from tests.snapshotter.house import principal_of, serve_app
from tests.snapshotter.unix import unix_transport


class Process:
    """`python -m snapshotter` over a data directory. It can be restarted after each end."""

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
        return httpx.Client(transport=transport, base_url="http://snapshotter", headers=principal_of(), timeout=60)


@contextmanager
def process_over(data: Path) -> Iterator[Process]:
    with ExitStack() as stack:
        directory = SocketDirectory(data / "run")
        stack.callback(directory.close)
        control = FakeControlPlane(data / "store")
        stack.enter_context(serve_app(control.app(), directory, CONTROL_SOCKET))
        process = Process(data, directory)
        process.start()
        try:
            yield process
        finally:
            if process.running is not None and process.running.poll() is None:
                process.end(signal.SIGKILL)
            process.close()


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
