"""A process forked by a zygote: its pidfd, its control socket, its jobs, its end.

Signals go through the pidfd, so they never reach another process that reused the pid.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Final

from kelvin.contracts.artifacts.runtime_control import GateFacts, GateJob, RuntimeReport, SealAttestation, SealJob
from kelvin.contracts.backoff import ExponentialBackoff
from kelvin.contracts.errors import Refused
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory

log = logging.getLogger(__name__)

TERM_S: Final = 10.0
KILL_S: Final = 30.0
_POLL_BACKOFF: Final = ExponentialBackoff(0.002, 0.05)  # between two checks whether a new process listens


def socket_name(runtime_id: str) -> str:
    """Return the name of a runtime's control and serving socket in the run directory."""
    return f"rt-{runtime_id}.sock"


class ForkedProcess:
    """A forked process. Owns the pidfd and the connections."""

    report_s: ClassVar[float] = 2.0  # time limit of `report`

    def __init__(self, directory: SocketDirectory, runtime_id: str, pid: int, pidfd: int) -> None:
        self.runtime_id = runtime_id
        self.pid = pid
        self.is_ending = False  # we end it on purpose, so it needs no replacement
        self._pidfd = pidfd
        self._directory = directory
        self._gone = asyncio.Event()
        self._client = ServiceClient(directory, socket_name(runtime_id), "the runtime", limit=4)
        asyncio.get_running_loop().add_reader(pidfd, self._exited)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.runtime_id} pid={self.pid} {'gone' if self.is_gone else 'alive'}>"

    @property
    def is_gone(self) -> bool:
        """Whether the process is dead."""
        return self._gone.is_set()

    @property
    def is_leaving(self) -> bool:
        """Whether the process is dead or was told to end."""
        return self.is_gone or self.is_ending

    async def gate(self, job: GateJob, timeout_s: float) -> GateFacts:
        """Decide whether the architecture may be served. Raises Refused."""
        return await self._client.call("POST", "/control/gate", GateFacts, body=job, timeout_s=timeout_s)

    async def seal(self, job: SealJob, timeout_s: float) -> SealAttestation:
        """Record the known answers of a draft. Raises Refused."""
        return await self._client.call("POST", "/control/seal", SealAttestation, body=job, timeout_s=timeout_s)

    async def report(self) -> RuntimeReport:
        """Return the process's report about itself. Raises Refused(Unavailable) if it does not listen."""
        return await self._client.call("GET", "/control/state", RuntimeReport, timeout_s=self.report_s)

    async def wait_parked(self, keep_waiting: Callable[[], bool]) -> bool:
        """Wait until it listens and can take a version. Return False if it dies or `keep_waiting` returns False."""
        polls = 1
        while not await self.wait_gone(_POLL_BACKOFF.delay_s(polls)):
            if (self._directory.path / socket_name(self.runtime_id)).exists() and await self._is_parked():
                return not self.is_gone
            if not keep_waiting():
                return False
            polls += 1
        return False

    async def wait_gone(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for its death. Return whether it is dead."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._gone.wait()
        return self.is_gone

    async def end(self, term_s: float = TERM_S) -> None:
        """Send SIGTERM, and SIGKILL after `term_s`. Return once it is dead, or stuck in the kernel for KILL_S."""
        self.is_ending = True
        self.signal(signal.SIGTERM)
        if not await self.wait_gone(term_s):
            self.signal(signal.SIGKILL)
            if not await self.wait_gone(KILL_S):
                log.error("a process survives SIGKILL: it is stuck in the kernel", extra={"pid": self.pid})

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process is dead or `close` was called."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def is_alive(self) -> bool:
        """Return whether the process lives, according to the kernel. The event loop learns of a death later."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except ProcessLookupError:
            return False
        return True

    async def close(self) -> None:
        """Close the pidfd and the connections. A living process goes on."""
        self._let_go()
        await self._client.close()

    def _let_go(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _exited(self) -> None:
        """Handle the death. Called once, on the event loop."""
        self._gone.set()
        self._let_go()
        with suppress(OSError):  # the disk may be read-only; a dead socket file does no harm
            (self._directory.path / socket_name(self.runtime_id)).unlink()

    async def _is_parked(self) -> bool:
        try:
            report = await self.report()
        except Refused:
            return False
        return report.runtime_id == self.runtime_id
