"""Calls to one process of the fleet: bind, drain, sleep and others. The replica table knows which version it has."""

from collections.abc import Callable
from typing import Final

from contracts.jobs import Bind, Bound
from controlplane import dependencies
from service.born import BornProcess
from service.unix import SocketDirectory

DRAIN_CALL_S: Final = dependencies.ORDERS.timeout_s


class Process(BornProcess):
    """A process of the fleet. `on_exit` is called once, on the event loop, when it is dead."""

    report_s = dependencies.REPORTS.timeout_s

    def __init__(
        self,
        directory: SocketDirectory,
        runtime_id: str,
        pid: int,
        pidfd: int,
        on_exit: Callable[["Process"], None],
    ) -> None:
        super().__init__(directory, runtime_id, pid, pidfd)
        self._on_exit = on_exit

    def _exited(self) -> None:
        super()._exited()
        self._on_exit(self)

    async def bind(self, bind: Bind, timeout_s: float) -> Bound:
        """Have it bind a version; return when it serves. Raises Refused: its failure, or Unavailable if it is lost."""
        return await self._client.call("POST", "/control/bind", Bound, body=bind, timeout_s=timeout_s)

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
        """Have it wake; return when it serves again. Raises Refused."""
        return await self._client.call("POST", "/control/wake", Bound, body=bind, timeout_s=timeout_s)
