"""Bind verified tensors to a model of transformers' classes. Parameters are views of the tensors.

Two cases copy: fused parameters whose parts are not adjacent in memory, and a move to another device.

There are two ways. `library` is transformers' own loader, right by definition. `fast` builds the modules with
parameters on the meta device and puts the tensors into them; it is right if `find_differences` found nothing at
sealing.

Measured for 0.5 GB in 16 layers on a CPU: library 75 ms the first time and 24 after. Fast takes 12 ms in a fresh fork
(5 of it page copies) and 7 in a warmed one, 5 of it for building the modules. Initialising on meta would add 8, and
formatting the config 1. The manifest lists the tensors; the gate decides whether the architecture may be served.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.utils import logging as library_logging

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.manifest import ENGINE_INTERFACE, Manifest
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import decode_lenient
from runtime.models import attention_hook
from runtime.models.families import SERVED, Family, Fusion
from runtime.models.pinned_files import CONFIG

BindMethod = Literal["fast", "library"]
TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A model ready for inference. It owns `config`, so changing that affects no other model."""

    module: nn.Module
    config: PreTrainedConfig


class BindingFault(Exception):
    """Tensors and modules do not match. No model is returned."""


def bind(
    manifest: Manifest,
    config_json: bytes,
    tensors: Mapping[str, torch.Tensor],
    *,
    bind_method: BindMethod,
    dtype: torch.dtype,
    device: torch.device,
) -> BoundModel:
    """Return the model of `manifest` over `tensors`. The tensors are read-only views that must outlive the model.
    Raises `Refused(ArtifactRejected)` if manifest, config and tensors do not match.
    """
    engine = manifest.engine
    try:
        if engine.interface != ENGINE_INTERFACE or engine.architecture not in SERVED:
            raise BindingFault(f"engine interface {engine.interface} of {engine.architecture} is not served here")
        family = SERVED[engine.architecture]
        config = parse_config(family, config_json, dtype)
        module = (
            _bind_fast(family, config, tensors) if bind_method == "fast" else _bind_by_library(family, config, tensors)
        )
        module.requires_grad_(False).eval()
        check_complete(family, module, tensors)
    except BindingFault as fault:
        raise Refused(ArtifactRejected(CONFIG, str(fault))) from fault
    move_to_device(module, device)
    return BoundModel(module, _config_of(module))


def reads_tensors(manifest: Manifest) -> bool:
    """Return whether the fast binding may read tensors: fused parameters are copied if their parts are not adjacent."""
    family = SERVED.get(manifest.engine.architecture)
    return family is None or bool(family.fusions)


def parse_config(family: Family, config_json: bytes, dtype: torch.dtype) -> PreTrainedConfig:
    """Return a new config object that uses our attention. (`from_dict` would also format it for a log line: 1 ms.)"""
    attention_hook.register_attention()
    values: dict[str, Any] = decode_lenient(config_json)
    config = family.config(**values)
    config.dtype = dtype
    config._attn_implementation = family.attention
    config._experts_implementation = None  # the library's default, because a config may name kernels to download
    return config


def build_skeleton(family: Family, config: PreTrainedConfig) -> nn.Module:
    """Return the modules with parameters on the meta device and real computed buffers. No weight is initialised."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        with no_init_weights(), _EmptyOnMeta():
            return family.model(config)
    finally:
        torch.set_default_dtype(before)


class _EmptyOnMeta(TorchFunctionMode):
    """Create empty tensors, which are parameters to fill, on the meta device. Tensors with values are computed for
    real. `torch.device("meta")` would lose the values of buffers such as rotary frequencies.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def move_to_device(module: nn.Module, device: torch.device) -> None:
    """Copy parameters and buffers to `device` unless they are there already. Complete on return; does nothing for a
    CPU. The copies run on their own stream, asynchronously from pinned memory. Tied parameters stay tied.
    """
    if device.type == "cpu":
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    moved: dict[int, nn.Parameter] = {}
    with torch.cuda.stream(stream):
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in moved:
                    copy = parameter.detach().to(device, non_blocking=parameter.is_pinned())
                    moved[id(parameter)] = nn.Parameter(copy, requires_grad=False)
                owner._parameters[name] = moved[id(parameter)]
        for owner, name, buffer in _buffers(module):
            owner._buffers[name] = buffer.to(device)
    stream.synchronize()


def _bind_fast(family: Family, config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    module = build_skeleton(family, config)
    missing = set[str]()
    for prefix, owner in module.named_modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            tensor = tensors.get(name)
            if tensor is None and (fusion := family.find_fusion(name)) is not None:
                tensor = view_or_concat(fusion_sources(fusion, name, parameter, tensors), tuple(parameter.shape))
            if tensor is None:
                missing.add(name)
                continue
            if tensor.shape != parameter.shape:
                raise BindingFault(f"'{name}' has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
            owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    _tie(module, missing)
    return module


def fusion_sources(
    fusion: Fusion, name: str, parameter: nn.Parameter, tensors: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors that `parameter` is made of, in order. Raises BindingFault."""
    pieces = []
    for piece, shape in fusion.stored_matrices(name, tuple(parameter.shape)):
        if piece not in tensors:
            raise BindingFault(f"'{piece}' is missing")
        if tuple(tensors[piece].shape) != shape:
            raise BindingFault(f"'{piece}' has shape {tuple(tensors[piece].shape)}, not {shape}")
        if tensors[piece].dtype != parameter.dtype:
            raise BindingFault(f"'{piece}' is {tensors[piece].dtype}, not {parameter.dtype}")
        pieces.append(tensors[piece])
    return pieces


def view_or_concat(pieces: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Return one tensor of `shape` over all `pieces` in order: a view if they are adjacent in memory, otherwise a copy.
    Versions are laid out so that pieces of whole pages are adjacent. A view keeps the pieces alive.
    """
    begin = end = pieces[0].data_ptr()
    arenas = {piece.untyped_storage().data_ptr() for piece in pieces}
    adjacent = len(arenas) == 1 or pieces[0].device.type == "cpu"  # separate device allocations can't be one view
    for piece in pieces:
        adjacent &= piece.data_ptr() == end and piece.is_contiguous() and piece.dtype == pieces[0].dtype
        end += piece.nbytes
    if not adjacent:
        return torch.cat([each.reshape(-1) for each in pieces]).view(shape)
    if len(arenas) == 1:
        return pieces[0].as_strided(shape, torch.empty(shape, device="meta").stride())
    buffer = (ctypes.c_ubyte * (end - begin)).from_address(begin)
    buffer._pieces = tuple(pieces)  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=pieces[0].dtype).view(shape)


def _tie(module: nn.Module, missing: set[str]) -> None:
    """Point each missing parameter at the one it is tied to. Either of the two may be in the file."""
    tied: Mapping[str, str] = module.all_tied_weights_keys  # type: ignore[assignment]
    pairs = {**tied, **{source: target for target, source in tied.items() if target not in missing}}
    for name in missing:
        source = pairs.get(name)
        if source is None or source in missing:
            raise BindingFault(f"'{name}' is missing")
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path)._parameters[leaf] = module.get_parameter(source)


def _bind_by_library(family: Family, config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    library_logging.disable_progress_bar()
    load: Any = family.model
    try:
        module, found = load.from_pretrained(
            None,
            config=config,
            state_dict={name: tensor for name, tensor in tensors.items() if name not in family.ignored_tensors},
            dtype=config.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report below has the name; the exception would not
        )
    except RuntimeError as error:  # experts that can't be fused into one parameter
        raise BindingFault(f"transformers does not load it: {str(error).strip()[:200]}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found.get(kind):
            raise BindingFault(f"{kind.replace('_', ' ')}: {sorted(map(str, found[kind]))[:4]}")
    bound: nn.Module = module
    return bound


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    return [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


def check_complete(family: Family, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise BindingFault unless parameters and `tensors` match exactly. Every parameter must be one of `tensors` at the
    same address, or be made of exactly its sources. Every tensor must be used, and nothing may be left on meta.
    """
    dtype: torch.dtype = _config_of(module).dtype
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    unused = set(tensors) - family.ignored_tensors
    for name, parameter in module.named_parameters():
        if parameter.dtype != dtype:
            raise BindingFault(f"'{name}' is {parameter.dtype}, not {dtype}")
        if name not in tensors and (fusion := family.find_fusion(name)) is not None:
            pieces = fusion_sources(fusion, name, parameter, tensors)
            if parameter.is_meta or not _is_made_of(parameter, pieces):
                raise BindingFault(f"'{name}' is not the verified tensors")
            unused.difference_update(piece for piece, _ in fusion.stored_matrices(name, tuple(parameter.shape)))
            continue
        if parameter.is_meta or parameter.data_ptr() not in names:
            raise BindingFault(f"'{name}' is not the verified tensor")
        unused.discard(names[parameter.data_ptr()])
    if unused:
        raise BindingFault(f"no parameter takes {sorted(unused)[:4]}")
    for _, name, buffer in _buffers(module):
        if buffer.is_meta:
            raise BindingFault(f"buffer '{name}' has no value")


def _is_made_of(parameter: torch.Tensor, pieces: Sequence[torch.Tensor]) -> bool:
    """Return whether the parameter's values are those of `pieces`, one after another."""
    flat, start = parameter.detach().reshape(-1), 0
    for piece in pieces:
        if not has_equal_values(flat[start : start + piece.numel()], piece.reshape(-1)):
            return False
        start += piece.numel()
    return start == flat.numel()


def _config_of(module: nn.Module) -> PreTrainedConfig:
    return module.config


def find_differences(fast: nn.Module, library: nn.Module) -> tuple[str, ...]:
    """Return every difference that could change a result, in words; () if `fast` equals the library's module."""
    differences: list[str] = []

    def compare(kind: str, actual: Mapping[str, object], expected: Mapping[str, object]) -> None:
        for name in sorted({*actual, *expected}):
            found, wanted = actual.get(name, "nothing"), expected.get(name, "nothing")
            if found != wanted:
                differences.append(f"{kind} '{name}': {found} instead of {wanted}")

    compare("module", _module_facts(fast), _module_facts(library))
    compare("config", _config_facts(fast), _config_facts(library))
    for kind, actual, expected in (
        ("parameter", _named(fast.named_parameters), _named(library.named_parameters)),
        ("buffer", _named(fast.named_buffers), _named(library.named_buffers)),
    ):
        facts, expected_facts = (
            {name: _tensor_facts(tensor) for name, tensor in tensors.items()} for tensors in (actual, expected)
        )
        compare(kind, facts, expected_facts)
        alike = [name for name in facts if facts[name] == expected_facts.get(name)]
        differences.extend(
            f"{kind} '{name}': other values" for name in alike if not has_equal_values(actual[name], expected[name])
        )
    compare("ties of", _ties(fast), _ties(library))
    return tuple(differences)


def has_equal_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether both tensors have equal values."""
    # At the same address nothing has to be read.
    return first.data_ptr() == second.data_ptr() or torch.equal(first, second)


def _config_facts(module: nn.Module) -> dict[str, object]:
    config: Any = module.config
    return {key: value for key, value in config.to_dict().items() if not key.startswith("_")}


def _named(iterate: Callable[..., Any]) -> dict[str, torch.Tensor]:
    return dict(iterate(remove_duplicate=False))


def _module_facts(module: nn.Module) -> dict[str, object]:
    """Return tree, classes, modes, and the plain numbers and texts that forwards read (`layer_idx`, `scaling`, ...)."""
    plain = (bool, int, float, str, type(None))
    facts: dict[str, object] = {}
    for name, child in module.named_modules():
        facts[name] = type(child).__qualname__
        for key, value in vars(child).items():
            if isinstance(value, plain) and not key.startswith("_") and key != "name_or_path":
                facts[f"{name}.{key}"] = value
    return facts


def _tensor_facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _ties(module: nn.Module) -> dict[str, object]:
    """Return, for each name of a tied parameter, all of its names."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: names for names in groups.values() if len(names) > 1 for name in names}
