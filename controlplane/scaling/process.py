"""One process that the zygote bore: its pidfd, its control socket, its end. Which version it has is the table's.

Signals go through the pidfd, so they never reach a stranger who got the same number.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from contracts.errors import Refused
from contracts.jobs import Bind, Bound, GateFacts, GateJob, RuntimeReport, SealAttestation, SealJob
from controlplane import dependencies
from service.client import ServiceClient
from service.unix import SocketDirectory

log = logging.getLogger(__name__)

TERM_S: Final = 10.0
KILL_S: Final = 30.0
REPORT_S: Final = dependencies.REPORTS.timeout_s
DRAIN_CALL_S: Final = dependencies.ORDERS.timeout_s


def socket_name(runtime_id: str) -> str:
    """The control and serving socket of a runtime, in the run directory."""
    return f"rt-{runtime_id}.sock"


class Process:
    """Owns the pidfd and the connections. `on_exit` is called once, from the event loop, when it is dead."""

    def __init__(
        self,
        directory: SocketDirectory,
        runtime_id: str,
        pid: int,
        pidfd: int,
        on_exit: Callable[["Process"], None],
    ) -> None:
        self.runtime_id = runtime_id
        self.pid = pid
        self.is_ending = False  # its end is our doing, so nobody needs to make up for it
        self._pidfd = pidfd
        self._directory = directory
        self._on_exit = on_exit
        self._gone = asyncio.Event()
        self._client = ServiceClient(directory, socket_name(runtime_id), "the runtime", limit=4)
        asyncio.get_running_loop().add_reader(pidfd, self._exited)

    def __repr__(self) -> str:
        return f"<Process {self.runtime_id} pid={self.pid} {'gone' if self.is_gone else 'alive'}>"

    @property
    def is_gone(self) -> bool:
        """Whether it is dead."""
        return self._gone.is_set()

    @property
    def is_leaving(self) -> bool:
        """Whether it is dead or was told to end."""
        return self.is_gone or self.is_ending

    async def bind(self, bind: Bind, timeout_s: float) -> Bound:
        """Give it a version; returns when it serves. Raises Refused: its failure, or Unavailable where it is lost."""
        return await self._client.call("POST", "/control/bind", Bound, body=bind, timeout_s=timeout_s)

    async def gate(self, job: GateJob, timeout_s: float) -> GateFacts:
        """May the architecture be served? Raises Refused."""
        return await self._client.call("POST", "/control/gate", GateFacts, body=job, timeout_s=timeout_s)

    async def seal(self, job: SealJob, timeout_s: float) -> SealAttestation:
        """Record the known answers of a draft. Raises Refused."""
        return await self._client.call("POST", "/control/seal", SealAttestation, body=job, timeout_s=timeout_s)

    async def report(self, timeout_s: float = REPORT_S) -> RuntimeReport:
        """What it says of itself. Raises Refused(Unavailable) where it does not listen."""
        return await self._client.call("GET", "/control/state", RuntimeReport, timeout_s=timeout_s)

    async def drain(self) -> None:
        """Tell it to take nothing new. Raises Refused."""
        async with self._client.open("POST", "/control/drain", timeout_s=DRAIN_CALL_S):
            pass

    async def condemn(self) -> None:
        """Tell it that its memory was found wrong. Raises Refused."""
        async with self._client.open("POST", "/control/condemn", timeout_s=DRAIN_CALL_S):
            pass

    async def sleep(self, timeout_s: float) -> None:
        """Tell a replica without work to give back all but its weights. Raises Refused."""
        async with self._client.open("POST", "/control/sleep", timeout_s=timeout_s):
            pass

    async def drop(self, timeout_s: float) -> None:
        """Tell one that sleeps to give its weights back, too. Raises Refused."""
        async with self._client.open("POST", "/control/drop", timeout_s=timeout_s):
            pass

    async def wake(self, bind: Bind, timeout_s: float) -> Bound:
        """Have it serve again; returns when it does. Raises Refused."""
        return await self._client.call("POST", "/control/wake", Bound, body=bind, timeout_s=timeout_s)

    async def gone(self, timeout_s: float) -> bool:
        """Wait for its death; whether it came."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._gone.wait()
        return self.is_gone

    async def end(self, term_s: float = TERM_S) -> None:
        """SIGTERM, and SIGKILL where it lives on `term_s` later. Returns when it is dead."""
        self.is_ending = True
        self.signal(signal.SIGTERM)
        if not await self.gone(term_s):
            self.signal(signal.SIGKILL)
            if not await self.gone(KILL_S):
                log.error("a process survives SIGKILL: the kernel holds it", extra={"pid": self.pid})

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; one that is dead, or was let go, gets none."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def is_alive(self) -> bool:
        """By the kernel's word, which comes before the event loop's."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except ProcessLookupError:
            return False
        return True

    async def close(self) -> None:
        """Let go of it, dead or alive: the process lives on."""
        self._let_go()
        await self._client.close()

    def _let_go(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _exited(self) -> None:
        self._gone.set()
        self._let_go()
        (self._directory.path / socket_name(self.runtime_id)).unlink(missing_ok=True)
        self._on_exit(self)


async def is_parked(process: Process) -> bool:
    """Whether it listens and says that it can take a version."""
    try:
        report = await process.report()
    except Refused:
        return False
    return report.runtime_id == process.runtime_id
