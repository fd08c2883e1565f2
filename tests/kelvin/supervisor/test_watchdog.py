"""The watchdog kills only hanging processes. `tests/e2e/failures/test_hung_processes.py` uses an installation."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.supervisor.restart_policy import START_S
from kelvin.supervisor.watchdog import PROBE_INTERVAL_S, Watchdog, WatchedProcess, make_socket_probe
from tests.virtual_loop import run_virtually

SLEEPS = [sys.executable, "-c", "import threading; threading.Event().wait()"]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A child that does nothing."""
    with subprocess.Popen(SLEEPS) as child:
        yield child
        child.kill()


class Processes:
    """The watched processes, and which of them are silent."""

    def __init__(self, *pids: int, start_s: float = START_S) -> None:
        self._start_s = start_s
        self.there = [WatchedProcess(f"p{pid}", pid, "x.sock") for pid in pids]
        self.silent: set[int] = set()
        self.killed: list[tuple[int, str]] = []

    async def watch(self, seconds: float) -> None:
        """Run the watchdog for `seconds`."""
        watchdog = Watchdog(
            lambda: self.there, self.answers, lambda hung, why: self.killed.append((hung.pid, why)), self._start_s
        )
        task = asyncio.create_task(watchdog.run())
        await asyncio.sleep(seconds)
        task.cancel()

    async def answers(self, each: WatchedProcess) -> bool:
        """Answer like a real probe, which takes its time if the process is silent."""
        await asyncio.sleep(3.0 if each.pid in self.silent else 0.001)
        return each.pid not in self.silent


@pytest.mark.virtual_time
async def test_silent_process_is_killed_within_half_a_minute(process: subprocess.Popen[bytes]) -> None:
    """The time counts from the last answer, and the reason contains it."""
    processes = Processes(process.pid)

    watching = asyncio.create_task(processes.watch(60))
    await asyncio.sleep(10)
    processes.silent.add(process.pid)
    await asyncio.sleep(25)
    assert processes.killed == [(process.pid, "it did not answer for 18 s")]
    processes.there.clear()
    await watching
    assert process.wait() == -signal.SIGKILL


def test_replica_that_hangs_before_its_first_probe_is_killed(process: subprocess.Popen[bytes]) -> None:
    """A replica that has a version isn't starting, so it has no extra time. Control: a silent standby does."""
    processes = Processes(process.pid)
    replica = processes.there[0]
    processes.there = [replace(replica, has_answered=True), WatchedProcess("standby", os.getpid(), "y.sock")]
    processes.silent |= {process.pid, os.getpid()}
    run_virtually(processes.watch(27))
    assert processes.killed == [(process.pid, "it did not answer for 18 s")]
    assert process.wait() == -signal.SIGKILL


@pytest.mark.virtual_time
async def test_answering_process_is_not_killed(process: subprocess.Popen[bytes]) -> None:
    """Control: a process that misses only some probes is not killed."""
    processes = Processes(process.pid)

    watching = asyncio.create_task(processes.watch(600))
    for _ in range(20):
        processes.silent.add(process.pid)
        await asyncio.sleep(9)
        processes.silent.clear()
        await asyncio.sleep(2 * PROBE_INTERVAL_S)
    await watching
    assert processes.killed == []
    assert process.poll() is None


def test_longer_start_limit_delays_the_kill(process: subprocess.Popen[bytes]) -> None:
    """A control plane that migrates a large ledger is silent until it is done."""
    processes = Processes(process.pid, start_s=3600.0)
    processes.silent.add(process.pid)
    run_virtually(processes.watch(3000))
    assert processes.killed == []
    assert process.poll() is None


@pytest.mark.virtual_time
async def test_process_that_died_during_a_probe_is_not_killed_again() -> None:
    """Its pid may belong to another process by then."""
    processes = Processes(2**22 + 1)  # larger than any process id

    watching = asyncio.create_task(processes.watch(60))
    await asyncio.sleep(5)
    processes.silent.add(processes.there[0].pid)
    await asyncio.sleep(12)
    processes.there.clear()
    await watching
    assert processes.killed == []


SERVES = """
import asyncio, pathlib, sys
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from kelvin.process.service_lifecycle import run_service, serve_until
from kelvin.ipc.socket_directory import SocketDirectory

async def main(stop):
    directory = SocketDirectory(pathlib.Path(sys.argv[1]))
    status = int(sys.argv[2])
    app = Starlette(routes=[Route("/healthz", lambda request: Response(status_code=status))])
    listener = directory.listen("x.sock")
    print("up", flush=True)
    await serve_until(app, listener, stop, 1)

run_service(main, None)
"""


@pytest.mark.parametrize("status", [200, 503], ids=["healthy", "unhealthy, but an answer"])
def test_process_is_probed_over_its_socket(tmp_path: Path, status: int) -> None:
    """The process answers while its event loop runs, and not while it is stopped or gone."""
    command = [sys.executable, "-c", SERVES, str(tmp_path), str(status)]
    with closing(SocketDirectory(tmp_path)) as directory, subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        watched = WatchedProcess("x", child.pid, "x.sock")

        async def answers() -> bool:
            return await make_socket_probe(directory)(watched)

        assert asyncio.run(answers())
        child.send_signal(signal.SIGSTOP)
        assert not asyncio.run(answers())
        child.send_signal(signal.SIGCONT)
        assert asyncio.run(answers())
        child.kill()
        child.wait()
        assert not asyncio.run(answers())


def test_silent_holder_of_the_socket_kills_no_other_process(tmp_path: Path) -> None:
    """A new activator takes over the old one's socket name. If it hangs, the old one is not killed."""
    command = [sys.executable, "-c", SERVES, str(tmp_path), "200"]
    with closing(SocketDirectory(tmp_path)) as directory, subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        child.send_signal(signal.SIGSTOP)

        async def answers(pid: int) -> bool:
            return await make_socket_probe(directory)(WatchedProcess("x", pid, "x.sock"))

        try:
            assert asyncio.run(answers(os.getpid()))
            assert not asyncio.run(answers(child.pid))
        finally:
            child.kill()
        child.wait()
        assert not asyncio.run(answers(os.getpid())), "nobody is there"


@pytest.mark.parametrize("socket_name", ["x.sock", None])
def test_lack_of_descriptors_counts_as_no_silence(tmp_path: Path, socket_name: str | None) -> None:
    """A supervisor without descriptors can't probe, and must not kill the installation for that."""

    async def main() -> bool:
        with closing(SocketDirectory(tmp_path)) as directory, no_descriptors_left():
            return await make_socket_probe(directory)(WatchedProcess("a process", 1, socket_name))

    assert asyncio.run(main())


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Use up this process's file descriptors."""
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, before[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
