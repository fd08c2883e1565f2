"""Calls to a pooled pod over mutual TLS: bind, release, state. See `runtime/api/control_api.py`."""

from typing import Final, TypeVar

from controlplane import dependencies
from kelvin.contracts.artifacts.runtime_control import BindPodRequest, BindResponse, RuntimeReport
from kelvin.contracts.roles import Role
from kelvin.ipc.connector import ConnectorFactory
from kelvin.ipc.service_client import ServiceClient

T = TypeVar("T")

RESTORE_S: Final = dependencies.RESTORE.timeout_s
CALL_S: Final = dependencies.POOL.timeout_s


class PodClient:
    """Opens a new connection for each call: between two lives of a pod nothing listens."""

    def __init__(self, connector_factory: ConnectorFactory) -> None:
        self._connector_factory = connector_factory

    async def bind(self, url: str, bind_request: BindPodRequest) -> BindResponse:
        """Bind a version to the pod; return when it serves. Idempotent. Raises Refused."""
        return await self._call(url, "POST", "/control/bind", BindResponse, bind_request, RESTORE_S)

    async def release(self, url: str, bind_request: BindPodRequest) -> None:
        """Tell the pod to drain its version and wait for another. Returns before that is done. Raises Refused."""
        await self._call(url, "POST", "/control/release", type(None), bind_request, CALL_S)

    async def read_state(self, url: str) -> RuntimeReport:
        """Return the pod's report of its state. Raises Refused."""
        return await self._call(url, "GET", "/control/state", RuntimeReport, None, CALL_S)

    async def _call(self, url: str, method: str, path: str, kind: type[T], body: object, timeout_s: float) -> T:
        client = ServiceClient.from_connector(
            self._connector_factory.connector_to(url, Role.RUNTIME), "the pod", limit=1
        )
        try:
            return await client.call(method, path, kind, body=body, timeout_s=timeout_s)
        finally:
            await client.close()
