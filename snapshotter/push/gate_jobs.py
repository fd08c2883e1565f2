"""Request work from the control plane: gate or seal on a standby, register a version, read a tenant's limits.

A `kelvin engine` whose directory is shared with us may do the gate and seal jobs instead.
"""

from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from kelvin.contracts.artifacts.runtime_control import ENGINE_SOCKET, GateFacts, GateJob, SealAttestation, SealJob
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.serving.control_messages import (
    NamedVersions,
    RegistrationResult,
    TenantLimits,
    VersionRegistration,
)
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from snapshotter.dependencies import REGISTRY

REGISTRY_S: Final = REGISTRY.timeout_s


T = TypeVar("T")
ENGINE_NAME: Final = "the engine"


class JobExecutor(Protocol):
    """The executor of a push's jobs: the control plane or an engine, with the same paths."""

    async def call(self, method: str, path: str, result: type[T], *, body: object | None = None, timeout_s: float) -> T:
        """Run a job and return its result. Raises `Refused`: the job's own refusal, or Unavailable."""
        ...


class StandaloneEngine:
    """An engine whose sockets are in `run`. It may stop or be replaced at any time, so each job opens a connection."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def __repr__(self) -> str:
        return f"<StandaloneEngine {self._run}>"

    async def call(self, method: str, path: str, result: type[T], *, body: object | None = None, timeout_s: float) -> T:
        """Run a job on the engine, as `JobExecutor.call` specifies."""
        try:
            directory = SocketDirectory(self._run, is_ours=False)
        except OSError as error:
            raise Refused(Unavailable(ENGINE_NAME)) from error
        with closing(directory):
            client = ServiceClient(directory, ENGINE_SOCKET, ENGINE_NAME, limit=1)
            try:
                return await client.call(method, path, result, body=body, timeout_s=timeout_s)
            finally:
                await client.close()


class GateJobs:
    """The calls to the control plane, or to `executor` for gate and seal jobs. Each call may be repeated.

    All calls raise `Refused`: the job's own refusal, or Unavailable.
    """

    def __init__(
        self, client: ServiceClient, gate_s: float, seal_s: float, executor: JobExecutor | None = None
    ) -> None:
        self._client = client
        self._executor: JobExecutor = client if executor is None else executor
        self._gate_s = gate_s
        self._seal_s = seal_s

    async def gate(self, job: GateJob) -> GateFacts:
        """Decide whether the architecture may be served."""
        return await self._executor.call("POST", "/internal/v1/jobs/gate", GateFacts, body=job, timeout_s=self._gate_s)

    async def seal(self, job: SealJob) -> SealAttestation:
        """Bind the draft and record its known answers."""
        return await self._executor.call(
            "POST", "/internal/v1/jobs/seal", SealAttestation, body=job, timeout_s=self._seal_s
        )

    async def register(self, registration: VersionRegistration) -> RegistrationResult | None:
        """Register a published version. Idempotent. Return None if the control plane is of an older build, which sends
        no body.
        """
        kind: Any = RegistrationResult | None
        answer: RegistrationResult | None = await self._client.call(
            "POST", "/internal/v1/versions", kind, body=registration, timeout_s=REGISTRY_S
        )
        return answer

    async def list_named_versions(self, tenant: str) -> tuple[str, ...]:
        """Return every version that a model of the tenant names."""
        path = f"/internal/v1/versions?tenant={tenant}"
        return (await self._client.call("GET", path, NamedVersions, timeout_s=REGISTRY_S)).versions

    async def read_limits(self, tenant: str) -> TenantLimits:
        """Return the tenant's own limits, where they differ from the installation's settings."""
        return await self._client.call(
            "GET", f"/internal/v1/tenants/{tenant}/limits", TenantLimits, timeout_s=REGISTRY_S
        )
