"""A version's verified bytes in this process, and the verified model that is bound over them.

The weight cache has verified the bytes, and `binding.py` binds a model to tensors. This module chooses the binding that
may be used and records known answers if there are none. It also detaches weights from a bound model and attaches them.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from kelvin.contracts.artifact_errors import ArtifactRejected, ProbeFailed
from kelvin.contracts.artifacts.manifest import Kind, Manifest
from kelvin.contracts.artifacts.runtime_control import Fingerprint, GateFacts, GateJob, Probe, SealAttestation
from kelvin.contracts.errors import Refused
from runtime.encoder import encoder_gate as encoder
from runtime.encoder import probe as encoder_probe
from runtime.encoder.recipe import read_recipe
from runtime.models import architecture_gate, probe
from runtime.models.binding import (
    TORCH_DTYPES,
    BindingFault,
    BindMethod,
    BoundModel,
    bind,
    check_complete,
    find_differences,
    fusion_sources,
    move_to_device,
    reads_tensors,
    view_or_concat,
)
from runtime.models.families import SERVED, Family
from runtime.models.pinned_files import CONFIG, PinnedFiles

log = logging.getLogger(__name__)


class Lease(Protocol):
    """A version's verified bytes, mapped read-only until the lease is closed or this process ends."""

    @property
    def manifest(self) -> Manifest:
        """Return the manifest, which was checked against the version's digest."""
        ...

    @property
    def attestations(self) -> Sequence[SealAttestation]:
        """Return the results of sealing jobs, under any fingerprint."""
        ...

    @property
    def bytes_by_tier(self) -> Mapping[str, int]:
        """Return how many bytes each tier delivered."""
        ...

    @property
    def in_use(self) -> bool:
        """Return whether tensors over the lease are alive."""
        ...

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a part of the linear space. Blocks until it has arrived. Raises `Refused`."""
        ...

    @property
    def is_whole(self) -> bool:
        """Return whether all bytes are known to have arrived."""
        ...

    def wait_until_whole(self) -> None:
        """Block until all bytes have arrived. No tensor may be read before. Raises `Refused`."""
        ...

    def close(self) -> None:
        """Unmap the bytes and tell the weight cache. A later read of the memory crashes the process."""
        ...


class DetachableModel:
    """A bound model whose weights can be detached and attached again. Its modules stay; its parameters change memory.

    Binding checked the tensor of each parameter. `detach_weights` remembers it, and `attach_weights` rebuilds the
    parameters from the same version's tensors at their new addresses. In between, all parameters are on the meta
    device, so that a forward fails and reads nothing.
    """

    def __init__(self, family: Family, module: nn.Module) -> None:
        self.module = module
        self._family = family
        self._sources: dict[str, str | None] = {}  # the tensor of each parameter; None if fused from several

    def detach_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Release `tensors`, over which the module was bound or attached."""
        names = {tensor.data_ptr(): name for name, tensor in tensors.items()}

        def on_meta(name: str, parameter: nn.Parameter) -> torch.Tensor:
            fused = name not in tensors and self._family.find_fusion(name) is not None
            self._sources[name] = None if fused else names[parameter.data_ptr()]
            shape, stride = parameter.shape, parameter.stride()
            return torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta")

        _replace_parameters(self.module, on_meta)

    def attach_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Point every parameter at its place in `tensors`, which belong to the same version as the detached ones.

        Raises `Refused(ArtifactRejected)` if a parameter lies elsewhere afterwards.
        """

        def from_tensors(name: str, parameter: nn.Parameter) -> torch.Tensor:
            source, fusion = self._sources[name], self._family.find_fusion(name)
            if source is not None:
                return tensors[source].as_strided(parameter.shape, parameter.stride())
            assert fusion is not None
            return view_or_concat(fusion_sources(fusion, name, parameter, tensors), tuple(parameter.shape))

        try:
            _replace_parameters(self.module, from_tensors)
            check_complete(self._family, self.module, tensors)
        except BindingFault as fault:
            raise Refused(ArtifactRejected(CONFIG, str(fault))) from fault
        self._sources.clear()


def _replace_parameters(module: nn.Module, make_tensor: Callable[[str, nn.Parameter], torch.Tensor]) -> None:
    """Replace each parameter by a new one. Tied parameters stay tied."""
    old = dict(module.named_parameters())  # keeps the old parameters alive, so that no id is reused
    new = {id(each): nn.Parameter(make_tensor(name, each), requires_grad=False) for name, each in old.items()}
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[leaf] = new[id(parameter)]


@dataclass(frozen=True, slots=True)
class Weights:
    """A lease and its tensors.

    On a CPU the tensors are views of the lease: valid while it is open, readable once it is whole. On a device they are
    copies; `copy_again` makes them again, and `build_host_tensors` returns the views. `device_checksum` is the checksum
    that a device computes over the bytes. It is None if no device has them or will get them.
    """

    lease: Lease
    tensors: dict[str, torch.Tensor]
    device_checksum: str | None = None
    copy_again: "Callable[[], Weights] | None" = None
    build_host_tensors: Callable[[], dict[str, torch.Tensor]] | None = None


AcquireLease = Callable[[str, str], Weights]  # arguments: tenant, version; raises `Refused`


@dataclass(frozen=True, slots=True)
class VerifiedModel:
    """A bound model, and what is known about it under this process's fingerprint."""

    bound: BoundModel
    probe: Probe
    facts: GateFacts
    recorded_seal: SealAttestation | None = None  # set if this engine had no known answers before


def resolve_device(device_class: str) -> torch.device:
    """Return the torch device of a class such as `cpu-2`. Every other class means this process's one GPU."""
    return torch.device("cpu") if device_class.partition("-")[0] == "cpu" else torch.device("cuda", 0)


def has_device(device_class: str) -> bool:
    """Return whether this process has the device of a class. Creates no context on a GPU."""
    return resolve_device(device_class).type == "cpu" or torch.cuda.device_count() > 0


def engine_fingerprint(device: torch.device) -> tuple[str, str]:
    """Return torch's version and the kind of device: the part of a fingerprint that all versions share."""
    return str(torch.__version__), "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def version_fingerprint(manifest: Manifest, device: torch.device) -> Fingerprint:
    """Return what known answers depend on. The number of threads or reserved cores is not part of it."""
    version, kind = engine_fingerprint(device)
    return Fingerprint(torch=version, dtype=manifest.engine.dtype, device_class=kind)


def read_pinned_files(lease: Lease) -> PinnedFiles:
    """Return the small files by name, copied out of the mapping."""
    return {file.path: bytes(lease.view(file.offset, file.size)) for file in lease.manifest.files}


def require_file(files: PinnedFiles, name: str) -> bytes:
    """Return that file. Raises `Refused(ArtifactRejected)` if the version does not have it."""
    if name not in files:
        raise Refused(ArtifactRejected(name, "is missing"))
    return files[name]


def build_gate_job(manifest: Manifest, files: PinnedFiles) -> GateJob:
    """Return the gate job of a stored version or draft. Raises `Refused` if it has no config."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors
    }
    recipe = {} if manifest.engine.kind == "generate" else {path: file.decode() for path, file in files.items()}
    return GateJob(config_json=require_file(files, CONFIG).decode(), tensors=tensors, recipe=recipe)


def check_architecture(job: GateJob) -> GateFacts:
    """Return the facts of a model that may be served. Only an embedding model has a `recipe`. Raises `Refused`."""
    return encoder.check_architecture(job) if job.recipe else architecture_gate.check_architecture(job)


def bind_weights(weights: Weights, files: PinnedFiles, bind_method: BindMethod, device: torch.device) -> BoundModel:
    """Bind the model to the tensors. Raises `Refused`.

    The library's loader would copy tensors from a device back to the CPU. For a device it therefore binds the views of
    the lease. Each parameter is then pointed at its copy on the device.
    """
    manifest = weights.lease.manifest
    dtype = TORCH_DTYPES[manifest.engine.dtype]
    config = require_file(files, CONFIG)
    if bind_method == "fast" or weights.build_host_tensors is None:
        return bind(manifest, config, weights.tensors, bind_method=bind_method, dtype=dtype, device=device)
    host = weights.build_host_tensors()
    bound = bind(manifest, config, host, bind_method=bind_method, dtype=dtype, device=torch.device("cpu"))
    detachable = DetachableModel(SERVED[manifest.engine.architecture], bound.module)
    detachable.detach_weights(host)
    detachable.attach_weights(weights.tensors)
    move_to_device(bound.module, device)
    return bound


def bind_fast_if_exact(
    weights: Weights, files: PinnedFiles, device: torch.device, library: BoundModel
) -> BoundModel | None:
    """Return the fast-bound module if it equals the library's exactly, else None."""
    try:
        fast = bind_weights(weights, files, "fast", device)
    except Refused:
        return None
    return None if find_differences(fast.module, library.module) else fast


def binds_without_reading(lease: Lease, device: torch.device) -> bool:
    """Return whether `bind_verified` reads no tensor, so that it may run before the lease is whole."""
    attestation = find_attestation(lease, version_fingerprint(lease.manifest, device))
    return attestation is not None and attestation.fast_bind and not reads_tensors(lease.manifest)


def bind_verified(version: str, weights: Weights, files: PinnedFiles, device: torch.device) -> VerifiedModel:
    """Bind as the attestation for this fingerprint allows. Without one, verify the model here. Raises `Refused`."""
    lease = weights.lease
    attestation = find_attestation(lease, version_fingerprint(lease.manifest, device))
    if attestation is not None:
        bind_method: BindMethod = "fast" if attestation.fast_bind else "library"
        return VerifiedModel(bind_weights(weights, files, bind_method, device), attestation.probe, attestation.gate)
    log.warning("no attestation for this fingerprint: recording known answers", extra={"version": version})
    facts = check_architecture(build_gate_job(lease.manifest, files))
    bound, seal = verify_and_record(version, weights, files, facts, device)
    return VerifiedModel(bound, seal.probe, facts, seal)


def find_attestation(lease: Lease, fingerprint: Fingerprint) -> SealAttestation | None:
    """Return the version's attestation for this fingerprint, or None."""
    return next((item for item in lease.attestations if item.fingerprint == fingerprint), None)


def verify_and_record(
    version: str, weights: Weights, files: PinnedFiles, facts: GateFacts, device: torch.device
) -> tuple[BoundModel, SealAttestation]:
    """Bind the model, fast if that is exact, and record known answers. Return model and seal. Raises `Refused`."""
    library = bind_weights(weights, files, "library", device)
    known_answers = _record_probe(version, library, files, facts.kind)
    fast = bind_fast_if_exact(weights, files, device, library)
    seal = SealAttestation(
        version=version,
        fingerprint=version_fingerprint(weights.lease.manifest, device),
        threads=torch.get_num_threads(),
        fast_bind=fast is not None,
        probe=known_answers,
        gate=facts,
        device_checksum=weights.device_checksum,
    )
    return fast or library, seal


def _record_probe(version: str, library: BoundModel, files: PinnedFiles, kind: Kind) -> Probe:
    """Record known answers with the library's own attention. Raises `Refused(ProbeFailed)` if one is not finite."""
    try:
        return encoder_probe.record(library, read_recipe(files)) if kind == "embed" else probe.record(library)
    except ValueError as error:
        raise Refused(ProbeFailed(version, str(error))) from error
