"""A version's verified bytes as this process has them, and the model that is bound over them, as far as it is proven.

Bytes are the weight cache's and verified there; how a model is bound is `binding.py`'s.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from contracts.artifact_errors import ArtifactRejected, ProbeFailed
from contracts.errors import Refused
from contracts.jobs import Fingerprint, GateFacts, GateJob, Probe, SealAttestation
from contracts.manifest import Kind, Manifest
from runtime import gate, probe
from runtime.binding import (
    DTYPES,
    BindingFault,
    BoundModel,
    How,
    bind,
    check_complete,
    compare,
    fuse,
    may_read,
    move,
    stored,
)
from runtime.encoder import probe as encoder_probe
from runtime.encoder import sealing as encoder
from runtime.encoder.recipe import read_recipe
from runtime.families import SERVED, Family
from runtime.pinned import CONFIG, PinnedFiles

log = logging.getLogger(__name__)


class Lease(Protocol):
    """A version's verified bytes, mapped read-only until it is closed, or this process ends."""

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

    @property
    def in_use(self) -> bool:
        """Whether tensors over it live."""
        ...

    def view(self, offset: int, nbytes: int) -> memoryview:
        """That part of the linear space, once it is there. Raises `Refused`."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether all of it is known to be there."""
        ...

    def until_whole(self) -> None:
        """Returns when all of it is there: before that no tensor may be read. Blocking. Raises `Refused`."""
        ...

    def close(self) -> None:
        """Unmap it, and tell who lent it. Whoever looks into it afterwards crashes."""
        ...


class Skeleton:
    """A bound model whose weights are taken away and given again: its modules stay, its parameters change memory.

    What each parameter is made of was checked when the model was bound; that is remembered here, and made again of the
    same tensors of the same version, wherever they lie by then. Empty it has every parameter on the meta device: a
    forward fails rather than reading anything.
    """

    def __init__(self, family: Family, module: nn.Module) -> None:
        self.module = module
        self._family = family
        self._sources: dict[str, str | None] = {}  # the tensor of each parameter; None: fused of several

    def __repr__(self) -> str:
        return f"<Skeleton {type(self.module).__name__} {'empty' if self._sources else 'full'}>"

    def empty(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let go of `tensors`, over which the module was bound or filled."""
        names = {tensor.data_ptr(): name for name, tensor in tensors.items()}

        def nothing(name: str, parameter: nn.Parameter) -> torch.Tensor:
            fused = name not in tensors and self._family.fusion_of(name) is not None
            self._sources[name] = None if fused else names[parameter.data_ptr()]
            shape, stride = parameter.shape, parameter.stride()
            return torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta")

        _renew(self.module, nothing)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Point every parameter at its place in `tensors`, which are the same version's as those that were let go.

        Raises `Refused(ArtifactRejected)` where afterwards a parameter lies anywhere else.
        """

        def something(name: str, parameter: nn.Parameter) -> torch.Tensor:
            source, fusion = self._sources[name], self._family.fusion_of(name)
            if source is not None:
                return tensors[source].as_strided(parameter.shape, parameter.stride())
            assert fusion is not None
            return fuse(stored(fusion, name, parameter, tensors), tuple(parameter.shape))

        try:
            _renew(self.module, something)
            check_complete(self._family, self.module, tensors)
        except BindingFault as fault:
            raise Refused(ArtifactRejected(CONFIG, str(fault))) from fault
        self._sources.clear()


def _renew(module: nn.Module, make: Callable[[str, nn.Parameter], torch.Tensor]) -> None:
    """Put a new parameter in each one's place. Ties stay ties."""
    old = dict(module.named_parameters())  # alive until all are replaced, so that no id comes twice
    fresh = {id(each): nn.Parameter(make(name, each), requires_grad=False) for name, each in old.items()}
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[leaf] = fresh[id(parameter)]


@dataclass(frozen=True, slots=True)
class Weights:
    """A lease and its tensors: views of it, which live as long as it does and may be read once it is whole, or copies
    on a device that `renew` makes again; `on_host` are the views beside them then. `device_checksum` is that of the
    bytes, where a device has them or will be given them.
    """

    lease: Lease
    tensors: dict[str, torch.Tensor]
    device_checksum: str | None = None
    renew: "Callable[[], Weights] | None" = None
    on_host: Callable[[], dict[str, torch.Tensor]] | None = None


Acquire = Callable[[str, str], Weights]  # of tenant and version; raises `Refused`


@dataclass(frozen=True, slots=True)
class Proven:
    """A bound model, and what is known of it under this process's fingerprint."""

    bound: BoundModel
    probe: Probe
    facts: GateFacts
    recorded: SealAttestation | None = None  # where nothing was known of this engine before


def device_of(device_class: str) -> torch.device:
    """The device behind a class such as `cpu-2`; anything that is no CPU is this process's one GPU."""
    return torch.device("cpu") if device_class.partition("-")[0] == "cpu" else torch.device("cuda", 0)


def has_device(device_class: str) -> bool:
    """Whether this process has what a class computes on. Makes no context on a GPU."""
    return device_of(device_class).type == "cpu" or torch.cuda.device_count() > 0


def engine_of(device: torch.device) -> tuple[str, str]:
    """Torch, and the device's kind: what of a fingerprint is known before any version is."""
    return str(torch.__version__), "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def fingerprint_of(manifest: Manifest, device: torch.device) -> Fingerprint:
    """What known answers depend on. Threads are not part of it, nor is how many cores a class reserves."""
    version, kind = engine_of(device)
    return Fingerprint(torch=version, dtype=manifest.engine.dtype, device_class=kind)


def pinned_files(lease: Lease) -> PinnedFiles:
    """The small files by name, copied out of the mapping."""
    return {file.path: bytes(lease.view(file.offset, file.size)) for file in lease.manifest.files}


def required(files: PinnedFiles, name: str) -> bytes:
    """Raises `Refused(ArtifactRejected)` where the version does not have it."""
    if name not in files:
        raise Refused(ArtifactRejected(name, "is missing"))
    return files[name]


def gate_job(manifest: Manifest, files: PinnedFiles) -> GateJob:
    """The gate's question about a sealed version."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors
    }
    recipe = {} if manifest.engine.kind == "generate" else {path: file.decode() for path, file in files.items()}
    return GateJob(config_json=required(files, CONFIG).decode(), tensors=tensors, recipe=recipe)


def examine(job: GateJob) -> GateFacts:
    """Return the facts of a model that may be served; only one that embeds has a `recipe`. Raises `Refused`."""
    return encoder.examine(job) if job.recipe else gate.examine(job)


def bind_weights(weights: Weights, files: PinnedFiles, how: How, device: torch.device) -> BoundModel:
    """The model over the lease's tensors.

    The library's loader takes what lies on a device back to the CPU. So there it binds the lease's own bytes, and each
    parameter is pointed at its copy on the device afterwards.
    """
    manifest = weights.lease.manifest
    dtype = DTYPES[manifest.engine.dtype]
    config = required(files, CONFIG)
    if how == "fast" or weights.on_host is None:
        return bind(manifest, config, weights.tensors, how=how, dtype=dtype, device=device)
    host = weights.on_host()
    bound = bind(manifest, config, host, how=how, dtype=dtype, device=torch.device("cpu"))
    skeleton = Skeleton(SERVED[manifest.engine.architecture], bound.module)
    skeleton.empty(host)
    skeleton.fill(weights.tensors)
    move(bound.module, device)
    return bound


def bind_fast_if_exact(
    weights: Weights, files: PinnedFiles, device: torch.device, library: BoundModel
) -> BoundModel | None:
    """The hand-made module, where it is exactly the library's."""
    try:
        fast = bind_weights(weights, files, "fast", device)
    except Refused:
        return None
    return None if compare(fast.module, library.module) else fast


def binds_unread(lease: Lease, device: torch.device) -> bool:
    """Whether `bind_proven` reads no tensor, so that they may be on their way still."""
    found = attested(lease, fingerprint_of(lease.manifest, device))
    return found is not None and found.fast_bind and not may_read(lease.manifest)


def bind_proven(version: str, weights: Weights, files: PinnedFiles, device: torch.device) -> Proven:
    """Bound as the attestation of this fingerprint allows; without one as the library does, and proven here first."""
    lease = weights.lease
    found = attested(lease, fingerprint_of(lease.manifest, device))
    if found is not None:
        how: How = "fast" if found.fast_bind else "library"
        return Proven(bind_weights(weights, files, how, device), found.probe, found.gate)
    log.warning("no attestation for this fingerprint: recording known answers", extra={"version": version})
    facts = examine(gate_job(lease.manifest, files))
    bound, seal = prove(version, weights, files, facts, device)
    return Proven(bound, seal.probe, facts, seal)


def attested(lease: Lease, fingerprint: Fingerprint) -> SealAttestation | None:
    """Return what is known of the version under this fingerprint."""
    return next((item for item in lease.attestations if item.fingerprint == fingerprint), None)


def prove(
    version: str, weights: Weights, files: PinnedFiles, facts: GateFacts, device: torch.device
) -> tuple[BoundModel, SealAttestation]:
    """The model, by hand where that is exact, and what was learnt of it under this fingerprint. Raises `Refused`."""
    library = bind_weights(weights, files, "library", device)
    known = _record(version, library, files, facts.kind)
    fast = bind_fast_if_exact(weights, files, device, library)
    seal = SealAttestation(
        version=version,
        fingerprint=fingerprint_of(weights.lease.manifest, device),
        threads=torch.get_num_threads(),
        fast_bind=fast is not None,
        probe=known,
        gate=facts,
        device_checksum=weights.device_checksum,
    )
    return fast or library, seal


def _record(version: str, library: BoundModel, files: PinnedFiles, kind: Kind) -> Probe:
    """Record known answers by the library's own attention. Raises `Refused(ProbeFailed)` if one is not finite."""
    try:
        return encoder_probe.record(library, read_recipe(files)) if kind == "embed" else probe.record(library)
    except ValueError as error:
        raise Refused(ProbeFailed(version, str(error))) from error
