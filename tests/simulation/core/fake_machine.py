"""Processes without a kernel: a zygote that forks standbys, runtimes, signals, pidfds and sockets.

A pidfd is the read end of a pipe whose write end closes when the process dies. A runtime's socket is a plain file.
"""

import asyncio
import errno
import math
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar
from unittest import mock

from kelvin.contracts.artifact_errors import ChunkCorrupt
from kelvin.contracts.artifacts.runtime_control import BindRequest, BindResponse, RuntimeReport, RuntimeState
from kelvin.contracts.errors import Conflict, Failure, Refused, Unavailable
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.ipc.forked_process import socket_name
from kelvin.ipc.zygote_client import PEER, ForkResult

T = TypeVar("T")

FIRST_PID: Final = 10_000_000  # larger than any real one
PARK_S: Final = 0.3
RESTORE_S: Final = (0.1, 5.0)
END_S: Final = (0.01, 0.5)
STREAMS: Final = 4
DRAIN_NOTICE_S: Final = 12.0  # the longest time from its drain until a silent replica knows of it


@dataclass(eq=False)
class FakeProcess:
    """One runtime process. `busy` is the number of its requests."""

    runtime_id: str
    pid: int
    writing: int  # the write end of its pipe
    inode: int  # of the pipe
    path: Path
    state: RuntimeState = RuntimeState.STANDBY
    bind: BindRequest | None = None
    busy: int = 0
    answers: asyncio.Event = field(default_factory=asyncio.Event)  # not set while it hangs
    hangs: bool = False  # for longer than a busy process is silent
    drains_since_s: float = math.inf
    is_ending: bool = False  # it was told to drain or to end, so it gets no new requests
    is_alive: bool = True
    tasks: set["asyncio.Task[Any]"] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.answers.set()

    @property
    def serves(self) -> bool:
        """Whether it can have requests in flight."""
        return self.state in (RuntimeState.READY, RuntimeState.DRAINING)

    def report(self) -> RuntimeReport:
        """Return the report of its state."""
        of = self.bind
        return RuntimeReport(
            runtime_id=self.runtime_id, pid=self.pid, state=self.state,
            tenant=of.tenant if of else None, model=of.model if of else None, version=of.version if of else None,
            device_class=of.device_class if of else None, max_streams=STREAMS if of else 0, running=self.busy,
        )  # fmt: skip


@dataclass(eq=False)
class FakeMachine:
    """All processes of one machine, and their faults."""

    random: Random
    run: Path
    processes: dict[int, FakeProcess] = field(default_factory=dict)
    by_fd: dict[int, FakeProcess] = field(default_factory=dict)
    restores_fail: float = 0.0
    restores_die: float = 0.0
    forks_fail: float = 0.0
    ends_slowly: bool = False
    drain_s: float = math.inf  # a replica's time to finish its streams
    cut: list[str] = field(default_factory=list)  # processes that were ended before that
    _next: int = FIRST_PID

    def named(self, runtime_id: str) -> FakeProcess | None:
        return next((each for each in self.processes.values() if each.runtime_id == runtime_id), None)

    def pidfd_open(self, pid: int, flags: int = 0) -> int:
        """Replacement of os.pidfd_open for this machine."""
        process = self.processes.get(pid)
        if process is None:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        # another read end of the same pipe
        fd = os.open(f"/proc/self/fd/{process.writing}", os.O_RDONLY | os.O_NONBLOCK)
        self.by_fd[fd] = process
        return fd

    def pidfd_send_signal(self, fd: int, number: int, *_: Any) -> None:
        """Replacement of signal.pidfd_send_signal for this machine."""
        process = self.by_fd[fd]
        if not process.is_alive:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        answers = process.serves and process.busy and not process.hangs
        if (
            answers
            and number
            and asyncio.get_running_loop().time() - process.drains_since_s < self.drain_s - DRAIN_NOTICE_S
        ):
            self.cut.append(process.runtime_id)
        process.is_ending |= number != 0
        if number == signal.SIGKILL:
            self._later(self.random.uniform(*END_S), process)
        elif number == signal.SIGTERM and process.answers.is_set():
            slow_s = 20.0 if self.ends_slowly else 0.0
            self._later(self.random.uniform(*END_S) + slow_s, process)

    def _later(self, after_s: float, process: FakeProcess) -> None:
        asyncio.get_running_loop().call_later(after_s, self.kill, process)

    def kill(self, process: FakeProcess) -> None:
        if process.is_alive:
            process.is_alive = False
            del self.processes[process.pid]
            os.close(process.writing)
            for task in process.tasks:
                task.cancel()

    def start_process(self, runtime_id: str) -> ForkResult:
        """Fork a standby, which listens soon."""
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._next += 1
        inode, path = os.fstat(reading).st_ino, self.run / socket_name(runtime_id)
        process = FakeProcess(runtime_id, self._next, writing, inode, path)
        self.processes[process.pid] = process
        self.by_fd[reading] = process
        asyncio.get_running_loop().call_later(self.random.uniform(0.0, PARK_S), self._park, process)
        return ForkResult(process.pid, reading)

    def _park(self, process: FakeProcess) -> None:
        if process.is_alive:
            process.path.touch()

    async def fork(self, runtime_id: str, timeout_s: float) -> ForkResult:
        """Fork as a zygote's client does."""
        await asyncio.sleep(self.random.uniform(0.001, 0.02))
        if self.random.random() < self.forks_fail:
            raise Refused(Unavailable(PEER))
        return self.start_process(runtime_id)

    def listener_pid(self, directory: object, name: str) -> int:
        """Return the process that listens at that socket. Raises OSError."""
        process = self.named(name[3:-5])
        if process is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return process.pid

    async def call(self, runtime_id: str, path: str, body: Any, timeout_s: float) -> Any:
        """Call a runtime's control socket. Raises Refused."""
        process = self.named(runtime_id)
        if process is None or not process.path.exists():
            raise Refused(Unavailable("the runtime"))
        work = asyncio.get_running_loop().create_task(self._serve(process, path, body), name=f"runtime {path}")
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # also if the caller no longer waits
        process.tasks.add(work)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(work)
        except TimeoutError:
            raise Refused(Unavailable("the runtime")) from None
        except asyncio.CancelledError:
            if work.cancelled() and not process.is_alive:
                raise Refused(Unavailable("the runtime")) from None
            raise
        finally:
            process.tasks.discard(work)

    async def _serve(self, process: FakeProcess, path: str, body: Any) -> Any:
        await asyncio.sleep(self.random.uniform(0.0005, 0.005))
        await process.answers.wait()  # a call that arrives while it hangs is answered afterwards
        match path:
            case "/control/state":
                return process.report()
            case "/control/bind":
                return await self._restore(process, body, RuntimeState.STANDBY)
            case "/control/wake":
                return await self._restore(process, body, process.state)
            case "/control/sleep":
                if process.state is not RuntimeState.READY or process.busy:
                    raise Refused(Conflict("state", f"is {process.state} and busy"))
                process.state = RuntimeState.ASLEEP
            case "/control/drop":
                if process.state is not RuntimeState.ASLEEP:
                    raise Refused(Conflict("state", f"is {process.state}"))
                process.state = RuntimeState.DEEP_SLEEP
            case "/control/drain":
                process.state, process.is_ending = RuntimeState.DRAINING, True
                process.drains_since_s = min(process.drains_since_s, asyncio.get_running_loop().time())
            case "/control/condemn":
                self._later(0.01, process)
        return None

    async def _restore(self, process: FakeProcess, bind: BindRequest, before: RuntimeState) -> BindResponse:
        asleep = (RuntimeState.ASLEEP, RuntimeState.DEEP_SLEEP)
        if process.state is not before or (before is not RuntimeState.STANDBY and before not in asleep):
            raise Refused(Conflict("state", f"is {process.state}"))
        process.state, process.bind = RuntimeState.RESTORING, bind
        await asyncio.sleep(self.random.uniform(*RESTORE_S))
        if self.random.random() < self.restores_die:
            self.kill(process)
            await asyncio.Event().wait()
        if self.random.random() < self.restores_fail:
            process.state = RuntimeState.FAILED
            self._later(0.05, process)
            raise Refused(self._why())
        process.state = RuntimeState.READY
        spans = (StageSpan(Stage.LEASED, 100), StageSpan(Stage.READY, 300))
        return BindResponse(runtime_id=process.runtime_id, max_streams=STREAMS, spans=spans, bytes_by_tier={"host": 1})

    def _why(self) -> Failure:
        return self.random.choice((ChunkCorrupt("c" * 64, "nvme"), Overloaded("the host tier", 1, 1.0)))

    def close(self) -> None:
        """Switch the machine off."""
        for process in list(self.processes.values()):
            self.kill(process)
        for fd, process in self.by_fd.items():
            with suppress(OSError):  # already closed by its owner; the number may be another file's by now
                if os.fstat(fd).st_ino == process.inode:
                    os.close(fd)


class RuntimeClient:
    """Replaces a runtime's ServiceClient."""

    machine: FakeMachine

    def __init__(self, directory: object, name: str, peer: str, *, limit: int = 64) -> None:
        self._runtime_id = name[3:-5]

    async def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: object | None = None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        answer: T = await self.machine.call(self._runtime_id, path, body, timeout_s)
        return answer

    @asynccontextmanager
    async def open(self, method: str, path: str, *, timeout_s: float | None = None, **_: Any) -> AsyncIterator[None]:
        """See ServiceClient. The response is empty."""
        await self.machine.call(self._runtime_id, path, None, timeout_s or 5.0)
        yield

    async def close(self) -> None:
        """Do nothing: nothing is open."""


@contextmanager
def without_kernel(machine: FakeMachine) -> Iterator[None]:
    """Let the fake machine replace the signals, pidfds and sockets of runtimes inside the block."""
    client = type("Client", (RuntimeClient,), {"machine": machine})
    with ExitStack() as stack:
        for name, substitute in (
            ("os.pidfd_open", machine.pidfd_open),
            ("signal.pidfd_send_signal", machine.pidfd_send_signal),
            ("kelvin.ipc.forked_process.ServiceClient", client),
            ("controlplane.scaling.local.adopter.ServiceClient", client),
            ("controlplane.scaling.local.adopter._listener_pid", machine.listener_pid),
        ):
            stack.enter_context(mock.patch(name, substitute))
        yield
