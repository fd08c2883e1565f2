"""The snapshotter's parts in one process, without sockets, over a store that can be killed at any call."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kelvin.blobstore.blob_store import BlobStat, BlobStore, Payload
from kelvin.blobstore.file_store import FileStore
from kelvin.blobstore.verifying_store import VerifyingStore
from kelvin.contracts.artifacts.push_api import Committed, PlanRequest
from kelvin.contracts.artifacts.runtime_control import GateFacts, GateJob, SealAttestation, SealJob
from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.serving.control_messages import RegistrationResult, TenantLimits, VersionRegistration
from kelvin.crypto.signing_keys import ensure_signer
from kelvin.crypto.trust_roots import PUBLIC_FILE, ROOTS, SECRET_FILE, read_trust
from snapshotter.maintenance.collector import Collector
from snapshotter.push.gate_jobs import GateJobs
from snapshotter.push.publisher import Publisher
from snapshotter.push.pushes import Pushes, PushLimits
from snapshotter.push.staging import Staging
from snapshotter.store.attestation_store import AttestationStore
from snapshotter.store.catalog import Catalog
from tests.snapshotter.control import attestation, gate_facts
from tests.snapshotter.models import Model
from tests.snapshotter.reader import read_version, versions_of
from tests.snapshotter.sender import commit, open_push, send


class Killed(BaseException):
    """Raised when the fake process is killed."""


@dataclass
class MortalStore:
    """A store whose process is killed at its nth call (counted from 1), before or after the call. Later calls fail."""

    inner: BlobStore
    dies_at: int | None = None
    before: bool = True
    calls: int = 0
    dead: bool = False

    def _count(self) -> bool:
        """Count a call. Return whether it is carried out but never answered."""
        if self.dead:
            raise Killed
        self.calls += 1
        if self.calls == self.dies_at:
            self.dead = True
            if self.before:
                raise Killed
            return True
        return False

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        is_last = self._count()
        found = await self.inner.put_if_absent(key, data)
        if is_last:
            raise Killed
        return found

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        is_last = self._count()
        found = await self.inner.read(key, offset, length)
        if is_last:
            raise Killed
        return found

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        is_last = self._count()
        await self.inner.read_into(key, offset, into)
        if is_last:
            raise Killed

    async def stat(self, key: str) -> BlobStat:
        if self._count():
            raise Killed
        return await self.inner.stat(key)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        if self._count():
            raise Killed
        async for key in self.inner.list(prefix):
            yield key

    async def delete(self, key: str) -> None:
        is_last = self._count()
        await self.inner.delete(key)
        if is_last:
            raise Killed


@dataclass
class DirectJobs(GateJobs):
    """Jobs without sockets, answered as by the fake control plane. A seal reads the draft as a runtime would."""

    root: Path
    seals: list[SealJob] = field(default_factory=list)
    registered: list[VersionRegistration] | None = None
    failure: Failure | None = None
    other_version: bool = False
    fault: str | None = None  # the fault of every version, as the control plane reports it

    async def gate(self, job: GateJob) -> GateFacts:
        return gate_facts(job)

    async def seal(self, job: SealJob) -> SealAttestation:
        self.seals.append(job)
        if self.failure is not None:
            raise Refused(self.failure)
        files, tensors = read_version(self.root, job.tenant, job.version, kind="drafts")
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {name: ("U8", (len(data),)) for name, data in tensors.items()}
        facts = gate_facts(GateJob(config_json=files["config.json"].decode(), tensors=shapes))
        return attestation("f" * 64 if self.other_version else job.version, facts)

    async def register(self, registration: VersionRegistration) -> RegistrationResult | None:
        assert versions_of(self.root, registration.tenant), "registered before it was published"
        self.registered = [*(self.registered or []), registration]
        if self.fault is not None and not registration.checked:
            return RegistrationResult(is_new=False, fault=self.fault)
        return None  # an earlier build's control plane answers nothing

    async def list_named_versions(self, tenant: str) -> tuple[str, ...]:
        return tuple({each.version for each in self.registered or [] if each.tenant == tenant})

    async def read_limits(self, tenant: str) -> TenantLimits:
        return TenantLimits()


def attestations_over(data: Path, store: BlobStore) -> AttestationStore:
    """Return attestations with the key and the trust roots of a data directory."""
    signer = ensure_signer(data / SECRET_FILE, data / PUBLIC_FILE)
    return AttestationStore(store, signer, read_trust(data, data / ROOTS))


@dataclass
class Bench:
    """The snapshotter's parts over a data directory, as one process has them."""

    pushes: Pushes
    store: MortalStore
    jobs: DirectJobs
    collector: Collector  # without a grace period

    @classmethod
    def over(
        cls,
        data: Path,
        dies_at: int | None = None,
        before: bool = True,
        kind: type[Publisher] = Publisher,
        tenant_store_bytes: int = 1 << 30,
    ) -> "Bench":
        store = MortalStore(VerifyingStore(FileStore(data / "store")), dies_at, before)
        jobs = DirectJobs(data / "store")
        staging = Staging(data / "staging", 8)
        catalog = Catalog(store)
        attestations = attestations_over(data, store)
        publisher = kind(store, staging, catalog, jobs, 32768, attestations)
        limits = PushLimits(8192, 1 << 30, tenant_store_bytes)
        pushes = Pushes(staging, catalog, publisher, jobs, limits, attestations)
        return cls(pushes, store, jobs, Collector(store, publisher, staging, jobs, 0.0))

    async def push(self, files: Mapping[str, bytes], request: PlanRequest) -> Committed:
        """Push a model, as a client that gives up at the first failure."""
        push = await open_push(self.pushes, files, request)
        await send(self.pushes, push)
        return await commit(self.pushes, push)


def push(bench: Bench, model: Model) -> Committed:
    return asyncio.run(bench.push(model.files(), model.request()))
