"""A fake control plane for the snapshotter's tests, on a real Unix socket.

It follows `kelvin/contracts/artifacts/runtime_control.py`. Gate jobs compute facts from config.json or refuse with 422.
Seal jobs read the draft and every chunk from the store, as a runtime does, and fail if one is missing. `versions`
accepts repeated registrations, and lists versions without deleted ones. Tenants have only the limits that a test sets.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI, Request, Response

from kelvin.contracts.artifact_errors import ArtifactRejected, ChunkMissing
from kelvin.contracts.artifacts.runtime_control import Fingerprint, GateFacts, GateJob, Probe, SealAttestation, SealJob
from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.serving.control_messages import (
    NamedVersions,
    RegistrationResult,
    StartProblem,
    TenantLimits,
    VersionRegistration,
)
from kelvin.contracts.wire import decode, encode
from kelvin.ipc.failure_responses import install_failure_handlers
from tests.snapshotter.reader import read_version

UNSERVED = "ChunkedForCausalLM"


@dataclass
class FakeControlPlane:
    """Records the requests. `failures` are raised once each, by job, before anything else."""

    store: Path
    gates: list[GateJob] = field(default_factory=list)
    seals: list[SealJob] = field(default_factory=list)
    registrations: list[VersionRegistration] = field(default_factory=list)
    failures: dict[str, list[Failure]] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    limits: dict[str, TenantLimits] = field(default_factory=dict)
    start_problem: StartProblem | None = None  # of every registered version

    def app(self) -> FastAPI:
        app = FastAPI()
        install_failure_handlers(app)

        @app.post("/internal/v1/jobs/gate")
        async def gate(request: Request) -> Response:
            job = decode(await request.body(), GateJob)
            self._fail("gate")
            self.gates.append(job)
            return Response(encode(gate_facts(job)))

        @app.post("/internal/v1/jobs/seal")
        async def seal(request: Request) -> Response:
            job = decode(await request.body(), SealJob)
            self._fail("seal")
            self.seals.append(job)
            return Response(encode(self._attest(job)))

        @app.post("/internal/v1/versions")
        async def versions(request: Request) -> Response:
            registration = decode(await request.body(), VersionRegistration)
            self._fail("versions")
            assert (self.store / registration.tenant / "manifests" / registration.version).exists()
            was_deleted = registration.version in self.deleted
            self.deleted.discard(registration.version)
            self.registrations.append(registration)
            registered = RegistrationResult(is_new=False, was_deleted=was_deleted, start_problem=self.start_problem)
            return Response(encode(registered))

        @app.get("/internal/v1/versions")
        async def named(tenant: str) -> Response:
            self._fail("named")
            versions = {each.version for each in self.registrations if each.tenant == tenant} - self.deleted
            return Response(encode(NamedVersions(versions=tuple(sorted(versions)))))

        @app.get("/internal/v1/tenants/{tenant}/limits")
        async def limits(tenant: str) -> Response:
            self._fail("limits")
            return Response(encode(self.limits.get(tenant, TenantLimits())))

        return app

    def _fail(self, job: str) -> None:
        if self.failures.get(job):
            raise Refused(self.failures[job].pop(0))

    def _attest(self, job: SealJob) -> SealAttestation:
        try:
            files, tensors = read_version(self.store, job.tenant, job.version, kind="drafts")
        except KeyError as error:
            raise Refused(ChunkMissing(str(error.args[0]))) from error
        gate = gate_facts(
            GateJob(
                config_json=files["config.json"].decode(),
                tensors={name: ("U8", (len(tensors[name]),)) for name in tensors},
            )
        )
        return attestation(job.version, gate)


def gate_facts(job: GateJob) -> GateFacts:
    """Return the facts that a forward pass would find. First use: the embedding, then parameters by name."""
    config = json.loads(job.config_json)
    architecture = config["architectures"][0]
    if architecture == UNSERVED:
        raise Refused(ArtifactRejected("config.json", f"{architecture} is not served: its attention is chunked"))
    names = sorted(job.tensors, key=lambda name: ("embed" not in name, name == "model.norm.weight", name))
    return GateFacts(
        architecture=architecture,
        dtype=config.get("dtype", "float32"),
        layers=2,
        kv_heads=1,
        head_dim=8,
        value_dim=8,
        vocab_size=config.get("gate_vocab_size", config["vocab_size"]),
        max_positions=config["max_position_embeddings"],
        kv_bytes_per_token=128,
        first_use=(*names, "lm_head.weight"),
    )


def attestation(version: str, gate: GateFacts) -> SealAttestation:
    """Return the attestation that sealing on a CPU would give."""
    return SealAttestation(
        version=version,
        fingerprint=Fingerprint(torch="2.13.0", dtype=gate.dtype, device_class="cpu-1"),
        threads=1,
        fast_bind=True,
        probe=Probe(token_ids=(1, 2), top_ids=((3, 4), (5, 6)), top_logits=((1.5, 0.5), (2.5, 1.0)), tolerance=0.01),
        gate=gate,
    )
