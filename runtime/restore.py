"""From a version's digest to a replica that can serve it: lease, tensors, model, engine. Blocking; in one thread.

Bytes are the weight cache's and verified there; how a model is bound is `binding.py`'s; what may go wrong at each step
is a `Refused`, after which the process serves nothing.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from contracts.artifact_errors import ArtifactRejected, ProbeFailed
from contracts.control import Bind, Fingerprint, GateFacts, GateJob, Probe, SealAttestation
from contracts.errors import Refused
from contracts.manifest import Manifest
from contracts.timeline import Span, Stage
from runtime import probe as known_answers
from runtime.binding import DTYPES, BoundModel, How, bind
from runtime.engine.core import ModelEngine
from runtime.engine.thread import EngineThread
from runtime.gate import examine
from runtime.pinned import PinnedFiles, sampling_defaults
from runtime.policy.blocks import BLOCK_SIZE
from runtime.replica import Wiring
from runtime.serving import Serving
from runtime.tokenizer import TextCodec

log = logging.getLogger(__name__)

CONFIG: Final = "config.json"
PROBE_AFTER_S: Final = 0.05  # a woken replica's first request comes at once; without one the probe runs alone


class Lease(Protocol):
    """A version's verified bytes, mapped read-only for as long as this process lives."""

    @property
    def manifest(self) -> Manifest:
        """Checked against the version's digest."""
        ...

    @property
    def attestations(self) -> Sequence[SealAttestation]:
        """What sealing jobs found, under any fingerprint."""
        ...

    @property
    def bytes_by_tier(self) -> Mapping[str, int]:
        """Where they came from."""
        ...

    def view(self, offset: int, nbytes: int) -> memoryview:
        """That part of the linear space."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """A lease and views of its tensors, which live as long as it does."""

    lease: Lease
    tensors: dict[str, torch.Tensor]


Acquire = Callable[[str, str], Weights]  # of tenant and version; raises `Refused`


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a version under this process's fingerprint."""

    how: How
    probe: Probe
    facts: GateFacts


def device_of(device_class: str) -> torch.device:
    """The device behind a class such as `cpu-2`; anything that is no CPU is this process's one GPU."""
    return torch.device("cpu") if device_class.partition("-")[0] == "cpu" else torch.device("cuda", 0)


def fingerprint_of(manifest: Manifest, device: torch.device) -> Fingerprint:
    """What known answers depend on. Threads are not part of it, nor is how many cores a class reserves."""
    kind = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return Fingerprint(torch=str(torch.__version__), dtype=manifest.engine.dtype, device_class=kind)


def pinned_files(lease: Lease) -> PinnedFiles:
    """The small files by name, copied out of the mapping."""
    return {file.path: bytes(lease.view(file.offset, file.size)) for file in lease.manifest.files}


def required(files: PinnedFiles, name: str) -> bytes:
    """Raises `Refused(ArtifactRejected)` where the version does not have it."""
    if name not in files:
        raise Refused(ArtifactRejected(name, "is missing"))
    return files[name]


def gate_job(manifest: Manifest, config_json: bytes) -> GateJob:
    """The gate's question about a sealed version."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors
    }
    return GateJob(config_json=config_json.decode(), tensors=tensors)


def bind_weights(weights: Weights, files: PinnedFiles, how: How, device: torch.device) -> BoundModel:
    """The model over the lease's tensors."""
    manifest = weights.lease.manifest
    dtype = DTYPES[manifest.engine.dtype]
    return bind(manifest, required(files, CONFIG), weights.tensors, how=how, dtype=dtype, device=device)


def record_probe(bound: BoundModel, version: str) -> Probe:
    """Known answers by the library's own attention. Raises `Refused(ProbeFailed)` where it has none."""
    try:
        return known_answers.record(bound)
    except ValueError as error:
        raise Refused(ProbeFailed(version, str(error))) from error


def restore(request: Bind, wiring: Wiring, acquire: Acquire) -> Serving:
    """Raises `Refused`. On return the engine's thread runs, and the replica may be called ready."""
    began_ns = time.monotonic_ns()
    spans: list[Span] = []

    def stamp(stage: Stage) -> None:
        spans.append(Span(stage, (time.monotonic_ns() - began_ns) // 1000))

    device = device_of(request.device_class)
    torch.set_num_threads(request.threads)
    weights = acquire(request.tenant, request.version)
    stamp(Stage.LEASED)
    files = pinned_files(weights.lease)
    bound, proof = _bind_proven(request.version, weights, files, device)
    stamp(Stage.BOUND)
    limits = weights.lease.manifest.limits
    engine = ModelEngine(
        bound,
        proof.facts,
        version=request.version,
        kv_bytes=request.kv_bytes,
        device=device,
        probe=proof.probe,
        max_running=limits.max_streams,
        max_waiting=limits.max_streams,
    )
    codec = TextCodec(files)
    # As many again may wait: a cancelled request leaves with the next step, its successor is there at once.
    thread = EngineThread(
        engine,
        on_events=wiring.on_events,
        on_busy=wiring.on_busy,
        limit=2 * limits.max_streams,
        probe_after_s=PROBE_AFTER_S,
    )
    stamp(Stage.READY)
    serving = Serving(
        bind=request,
        limits=limits,
        context_tokens=min(proof.facts.max_positions, engine.kv_blocks_total * BLOCK_SIZE),
        codec=codec,
        defaults=sampling_defaults(files),
        engine=engine,
        thread=thread,
        spans=tuple(spans),
        bytes_by_tier=weights.lease.bytes_by_tier,
    )
    thread.start()
    return serving


def _bind_proven(version: str, weights: Weights, files: PinnedFiles, device: torch.device) -> tuple[BoundModel, Proof]:
    """Bound as the attestation of this fingerprint allows; without one as the library does, and proven here first."""
    lease = weights.lease
    wanted = fingerprint_of(lease.manifest, device)
    found = next((item for item in lease.attestations if item.fingerprint == wanted), None)
    if found is not None:
        proof = Proof("fast" if found.fast_bind else "library", found.probe, found.gate)
        return bind_weights(weights, files, proof.how, device), proof
    log.warning("no attestation for this fingerprint: recording known answers", extra={"version": version})
    facts = examine(gate_job(lease.manifest, required(files, CONFIG)))
    bound = bind_weights(weights, files, "library", device)
    return bound, Proof("library", record_probe(bound, version), facts)
