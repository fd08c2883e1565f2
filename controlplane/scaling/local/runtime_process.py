"""Calls to one runtime process: bind, drain, sleep and others. The replica table knows which version it has."""

from collections.abc import Callable
from typing import Final

from controlplane import dependencies
from kelvin.contracts.artifacts.runtime_control import BindRequest, BindResponse
from kelvin.ipc.forked_process import ForkedProcess
from kelvin.ipc.socket_directory import SocketDirectory

DRAIN_CALL_S: Final = dependencies.ORDERS.timeout_s


class RuntimeProcess(ForkedProcess):
    """A process of the fleet. `on_exit` is called once, on the event loop, when it is dead."""

    report_s = dependencies.REPORTS.timeout_s

    def __init__(
        self,
        directory: SocketDirectory,
        runtime_id: str,
        pid: int,
        pidfd: int,
        on_exit: Callable[["RuntimeProcess"], None],
    ) -> None:
        super().__init__(directory, runtime_id, pid, pidfd)
        self._on_exit = on_exit

    def _exited(self) -> None:
        super()._exited()
        self._on_exit(self)

    async def bind(self, bind: BindRequest, timeout_s: float) -> BindResponse:
        """Bind a version; return when it serves. Raises Refused: its failure, or Unavailable if the process is lost."""
        return await self._client.call("POST", "/control/bind", BindResponse, body=bind, timeout_s=timeout_s)

    async def drain(self) -> None:
        """Tell the runtime to accept no new requests. Raises Refused."""
        async with self._client.open("POST", "/control/drain", timeout_s=DRAIN_CALL_S):
            pass

    async def report_damage(self) -> None:
        """Tell the runtime that its memory is damaged. Raises Refused."""
        async with self._client.open("POST", "/control/condemn", timeout_s=DRAIN_CALL_S):
            pass

    async def sleep(self, timeout_s: float) -> None:
        """Tell an idle replica to release everything but its weights. Raises Refused."""
        async with self._client.open("POST", "/control/sleep", timeout_s=timeout_s):
            pass

    async def release_weights(self, timeout_s: float) -> None:
        """Tell a sleeping replica to release its weights as well. Raises Refused."""
        async with self._client.open("POST", "/control/drop", timeout_s=timeout_s):
            pass

    async def wake(self, bind: BindRequest, timeout_s: float) -> BindResponse:
        """Wake a sleeping replica; return when it serves again. Raises Refused."""
        return await self._client.call("POST", "/control/wake", BindResponse, body=bind, timeout_s=timeout_s)
