"""A store, a registry and clients whose steps wait at gates, so that a test chooses their interleaving."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kelvin.blobstore.blob_store import BlobStat, Payload
from kelvin.blobstore.chunk_locations import decode_index
from kelvin.blobstore.memory_store import MemoryStore
from kelvin.blobstore.verifying_store import VerifyingStore
from kelvin.contracts.artifact_errors import ChunkMissing
from kelvin.contracts.artifacts.manifest import decode_manifest
from kelvin.contracts.artifacts.push_api import CollectReport
from kelvin.contracts.artifacts.runtime_control import GateFacts, GateJob, SealAttestation, SealJob
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import RegistrationResult, TenantLimits, VersionRegistration
from kelvin.contracts.wire import encode
from kelvin.crypto.signing_keys import Signer
from kelvin.crypto.trust_roots import Trust
from snapshotter.maintenance.collector import Collector
from snapshotter.push.gate_jobs import GateJobs
from snapshotter.push.publisher import Publisher
from snapshotter.push.pushes import Pushes, PushLimits
from snapshotter.push.staging import Staging
from snapshotter.store.attestation_store import AttestationStore
from snapshotter.store.catalog import Catalog
from tests.snapshotter.control import attestation, gate_facts
from tests.snapshotter.models import Model
from tests.snapshotter.sender import TENANT, ask_missing, commit

SIGNER = Signer(Ed25519PrivateKey.generate())
ROUNDS = 30


class Gates:
    """The steps that wait at gates, in the order in which they arrived."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        gate = asyncio.get_running_loop().create_future()
        self.waiting.append(gate)
        await gate

    def open(self, which: int) -> None:
        gate = self.waiting.pop(which % len(self.waiting))
        if not gate.done():  # the step may have been cancelled
            gate.set_result(None)


@dataclass
class GatedStore:
    """A store that waits at a gate before each call."""

    inner: MemoryStore
    gates: Gates

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        await self.gates.wait()
        return await self.inner.put_if_absent(key, data)

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        await self.gates.wait()
        return await self.inner.read(key, offset, length)

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        await self.gates.wait()
        await self.inner.read_into(key, offset, into)

    async def stat(self, key: str) -> BlobStat:
        return await self.inner.stat(key)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        await self.gates.wait()
        async for key in self.inner.list(prefix):
            yield key

    async def delete(self, key: str) -> None:
        await self.gates.wait()
        await self.inner.delete(key)


@dataclass
class GatedJobs(GateJobs):
    """Jobs that read for a seal what a runtime would read. They name registered versions that were not deleted."""

    store: MemoryStore
    gates: Gates
    named_versions: set[str] = field(default_factory=set)

    async def gate(self, job: GateJob) -> GateFacts:
        return gate_facts(job)

    async def seal(self, job: SealJob) -> SealAttestation:
        await self.gates.wait()
        if (missing_object := lacking(self.store, "drafts", job.version)) is not None:
            raise Refused(ChunkMissing(missing_object))
        await self.gates.wait()
        return attestation(job.version, gate_facts(GateJob(config_json=CONFIG, tensors={})))

    async def register(self, registration: VersionRegistration) -> RegistrationResult | None:
        await self.gates.wait()
        self.named_versions.add(registration.version)
        await self.gates.wait()
        return None

    async def list_named_versions(self, tenant: str) -> tuple[str, ...]:
        await self.gates.wait()
        found = tuple(self.named_versions)
        await self.gates.wait()
        return found

    async def read_limits(self, tenant: str) -> TenantLimits:
        return TenantLimits()


CONFIG = Model().files()["config.json"].decode()


def lacking(store: MemoryStore, kind: str, version: str) -> str | None:
    """Return the first object or chunk that a reader of the version would miss; None if it is whole."""
    blobs = store._blobs
    raw = blobs.get(f"{TENANT}/{kind}/{version}")
    if raw is None:
        return f"{kind}/{version}"
    stored: set[str] = set()
    for key, table in blobs.items():
        if key.startswith(f"{TENANT}/index/") and key.replace("/index/", "/packs/") in blobs:
            stored |= decode_index(table, key.rpartition("/")[2]).keys()
    if kind == "manifests" and not any(key.startswith(f"{TENANT}/attestations/{version}/") for key in blobs):
        return "an attestation"
    return next((chunk.digest for chunk in decode_manifest(raw, version).chunks if chunk.digest not in stored), None)


class World:
    """One snapshotter over a gated store, driven step by step. Call `close`."""

    def __init__(self, data: Path, grace_s: float, publisher: type[Publisher], staging: type[Staging]) -> None:
        self.now_s = 2_000_000_000.0  # later than the real clock, which staging uses for its dates
        self.loop = asyncio.new_event_loop()
        self.gates = Gates()
        self.memory = MemoryStore(lambda: self.now_s)
        self.jobs = GatedJobs(self.memory, self.gates)
        store = VerifyingStore(GatedStore(self.memory, self.gates))
        staged = staging(data / "staging", 8)
        catalog = Catalog(store)
        attestations = AttestationStore(store, SIGNER, Trust({SIGNER.key_id: "test"}))
        self.publisher = publisher(store, staged, catalog, self.jobs, 3 * 4096, attestations)
        limits = PushLimits(4096, 1 << 30, 1 << 30)
        self.pushes = Pushes(staged, catalog, self.publisher, self.jobs, limits, attestations)
        self.collector = Collector(store, self.publisher, staged, self.jobs, grace_s, lambda: self.now_s)
        self.clients: list[asyncio.Task[str]] = []
        self.collections: list[asyncio.Task[CollectReport]] = []

    def push(self, model: Model) -> None:
        self.clients.append(self.loop.create_task(self._push(model)))
        self.settle()

    def collect(self) -> None:
        self.collections.append(self.loop.create_task(self.collector.collect(TENANT, run=True)))
        self.settle()

    def step(self, which: int) -> None:
        if self.gates.waiting:
            self.gates.open(which)
            self.settle()

    def settle(self) -> None:
        """Let all tasks run up to their next gates."""

        async def run_tasks() -> None:
            for _ in range(40):
                await asyncio.sleep(0)

        self.loop.run_until_complete(run_tasks())

    def finish(self, which: Callable[[int], int] = lambda _: 0) -> None:
        """Open gates until none is left. Every push must have its version by then, and every collection its end."""
        for number in range(100_000):
            if not self.gates.waiting:
                break
            self.step(which(number))
        for task in [*self.clients, *self.collections]:
            assert task.done(), f"{task} hangs"
            task.result()

    def check(self) -> None:
        """Assert that every named version is whole."""
        for version in self.jobs.named_versions:
            missing_object = lacking(self.memory, "manifests", version)
            assert missing_object is None, f"version {version} lacks {missing_object}"

    def close(self) -> None:

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(end())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    async def _push(self, model: Model) -> str:
        """Push as `kelvin push` does: missing chunks are sent again, and an expired plan starts again."""
        files, request = model.files(), encode(model.request())
        for _ in range(ROUNDS):
            plan = await self.pushes.plan(TENANT, request)
            try:
                push = await ask_missing(self.pushes, plan, files)
                for digest in push.missing:
                    await self.gates.wait()
                    await self.pushes.put_chunk(TENANT, push.push_id, digest, push.chunks[digest])
                await self.gates.wait()
                return (await commit(self.pushes, push)).version
            except Refused as refused:
                if refused.failure.code not in ("conflict", "not_found"):
                    raise
        raise AssertionError("the push did not come to its end")


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Replace `asyncio.to_thread`: run the function on the loop, so that steps are repeatable."""
    found = function(*arguments)
    assert not inspect.isawaitable(found)
    return found
