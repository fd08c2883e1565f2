"""Activators as forks of one process that has already imported their modules, because imports take most of a start.
Tests of an installation start `python -m activator` itself.
"""

import asyncio
import multiprocessing
import os
import runpy
import signal
import socket
from pathlib import Path
from typing import Final

from kelvin.ipc.tcp_listener import LISTENER_VARIABLE
from tests.forkserver import FORKS

_FRESH: Final = multiprocessing.get_context("spawn")  # for programs that change something before they import it


def _run(program: str, environment: dict[str, str], log: Path, listener: socket.socket | None) -> None:
    """Run the program in the fork as `python -m` would."""
    os.environ.clear()
    os.environ.update(environment)
    if listener is not None:
        os.environ[LISTENER_VARIABLE] = str(listener.detach())
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(fd, 2)
    os.close(fd)
    runpy.run_module(program, run_name="__main__", alter_sys=True)


class ForkedActivator:
    """The process of an activator, or of a program that runs one. Its diagnostics are appended to `log`."""

    def __init__(
        self, program: str, environment: dict[str, str], log: Path, listener: socket.socket | None = None
    ) -> None:
        context = FORKS if program == "activator" else _FRESH
        self._process = context.Process(target=_run, args=(program, environment, log, listener))
        self._process.start()
        assert self._process.pid is not None
        self.pid: Final = self._process.pid

    def __repr__(self) -> str:
        return f"<ForkedActivator {self.pid} {self.returncode}>"

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Wait until the process has ended. Return its exit status."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        assert self.returncode is not None
        return self.returncode
