"""A version's verified bytes in this process, and the model that is bound over them and proven.

The weight cache has verified the bytes. `binding.py` binds a model to tensors; this module decides which binding may be
used, records known answers where there are none, and takes weights away from a bound model and gives them back.
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
        """How many bytes came from which tier."""
        ...

    @property
    def in_use(self) -> bool:
        """Whether tensors over it live."""
        ...

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return that part of the linear space. Blocks until it is there. Raises `Refused`."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether all of it is known to be there."""
        ...

    def until_whole(self) -> None:
        """Block until all of it is there; no tensor may be read before. Raises `Refused`."""
        ...

    def close(self) -> None:
        """Unmap it, and tell the weight cache. A later read of its memory crashes the process."""
        ...


class Skeleton:
    """A bound model whose weights are taken away and given again: its modules stay, its parameters change memory.

    Binding checked which tensor each parameter is made of. The skeleton remembers that, and makes the parameters again
    of the same version's tensors, wherever those lie by then. While it is empty, all parameters are on the meta device,
    so that a forward fails and reads nothing.
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
        """Point every parameter at its place in `tensors`, those of the version that was let go.

        Raises `Refused(ArtifactRejected)` if a parameter lies anywhere else afterwards.
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
    """A lease and its tensors.

    On a CPU the tensors are views of the lease: valid as long as it is, readable once it is whole. On a device they are
    copies, which `renew` makes again, and `on_host` returns the views. `device_checksum` is that of the bytes, if a
    device has them or will be given them.
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
    """Return torch's version and the device's kind: the part of a fingerprint that no version changes."""
    return str(torch.__version__), "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def fingerprint_of(manifest: Manifest, device: torch.device) -> Fingerprint:
    """Return what known answers depend on. Threads, and the cores that a class reserves, are no part of it."""
    version, kind = engine_of(device)
    return Fingerprint(torch=version, dtype=manifest.engine.dtype, device_class=kind)


def pinned_files(lease: Lease) -> PinnedFiles:
    """The small files by name, copied out of the mapping."""
    return {file.path: bytes(lease.view(file.offset, file.size)) for file in lease.manifest.files}


def required(files: PinnedFiles, name: str) -> bytes:
    """Return that file. Raises `Refused(ArtifactRejected)` if the version does not have it."""
    if name not in files:
        raise Refused(ArtifactRejected(name, "is missing"))
    return files[name]


def gate_job(manifest: Manifest, files: PinnedFiles) -> GateJob:
    """Return the job by which the gate judges a version that is sealed already. Raises `Refused`."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors
    }
    recipe = {} if manifest.engine.kind == "generate" else {path: file.decode() for path, file in files.items()}
    return GateJob(config_json=required(files, CONFIG).decode(), tensors=tensors, recipe=recipe)


def examine(job: GateJob) -> GateFacts:
    """Return the facts of a model that may be served; only one that embeds has a `recipe`. Raises `Refused`."""
    return encoder.examine(job) if job.recipe else gate.examine(job)


def bind_weights(weights: Weights, files: PinnedFiles, how: How, device: torch.device) -> BoundModel:
    """Bind the model to the tensors. Raises `Refused`.

    The library's loader would copy tensors from a device back to the CPU. So for a device it binds the views of the
    lease, and each parameter is then pointed at its copy on the device.
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
    """Return the hand-made module if it equals the library's exactly, else None."""
    try:
        fast = bind_weights(weights, files, "fast", device)
    except Refused:
        return None
    return None if compare(fast.module, library.module) else fast


def binds_unread(lease: Lease, device: torch.device) -> bool:
    """Return whether `bind_proven` will read no tensor, so that it may run before the lease is whole."""
    found = attested(lease, fingerprint_of(lease.manifest, device))
    return found is not None and found.fast_bind and not may_read(lease.manifest)


def bind_proven(version: str, weights: Weights, files: PinnedFiles, device: torch.device) -> Proven:
    """Bind as the attestation of this fingerprint allows. Without one, prove the model here. Raises `Refused`."""
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
    """Bind the model, by hand if that is exact, and record known answers. Return it and its seal. Raises `Refused`."""
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
