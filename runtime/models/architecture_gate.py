"""Decide whether an architecture may be served, by one forward on the meta device, which has no weights.

Some architectures would silently give wrong results in our engine: attention that bypasses it, state across tokens,
rotary frequencies chosen per forward. They are refused with name and rule. The known-answer probe checks the results.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from kelvin.contracts.artifacts.runtime_control import GateFacts, GateJob
from kelvin.contracts.wire import BadJson, decoder
from runtime.models.artifact_rejection import artifact_rejected, public_message
from runtime.models.binding import TORCH_DTYPES, parse_config
from runtime.models.families import DECODERS, Family
from runtime.models.pinned_files import CONFIG

_ATTENTION: Final = "kelvin_gate"
_RECORDER: Final = "kelvin_recorder"
TRACED_TOKENS: Final = 8
_ROWS: Final = (1, 7)  # the rows whose logits are computed

_FORBIDDEN: Final[Mapping[str, str]] = {
    "auto_map": "names its own code, which is never run",
    "trust_remote_code": "asks to trust its own code, which is never run",
    "quantization_config": "is quantised, which this engine does not compute",
    "fusion_config": "asks to rewrite modules, which changes answers",
    "attention_chunk_size": "has chunked attention: the chunks exist only in a mask that is not built here",
    "per_layer_config": "has layers of their own configuration",
    "output_attentions": "asks for outputs that no response needs",
    "output_hidden_states": "asks for outputs that no response needs",
    "output_router_logits": "asks for outputs that no response needs",
    "use_bidirectional_attention": "attends to later tokens",
}
# The frequencies of other types ('dynamic', 'longrope') depend on the longest position in a forward. One long request
# would change the results of all other requests in the batch, and the stored keys.
_ROPE_TYPES: Final = frozenset({"default", "linear", "llama3", "yarn"})
_MAX_POSITIONS: Final = 1 << 30
_ROPE_POSITIVE: Final = (
    "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
)  # fmt: skip
_ST_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Arguments that transformers passes to every attention function, and that no served model needs.
_IGNORED_ARGUMENTS: Final = frozenset(
    {"position_ids", "use_cache", "past_key_values", "cache_position", "is_causal", "output_router_logits"}
)
_SUPPORTED_ARGUMENTS: Final = frozenset({"scaling", "sliding_window", "dropout"})


def check_architecture(job: GateJob) -> GateFacts:
    """Return the facts of a servable decoder. Raises `Refused(ArtifactRejected)` naming config.json or the tensor."""
    values = read_config_values(job.config_json)
    family = find_family(values, DECODERS)
    dtype_name = find_dtype(values, job.tensors)
    AttentionInterface.register(_ATTENTION, _record)
    module, config = build_meta_skeleton(
        family, job.config_json, TORCH_DTYPES[dtype_name], len(job.tensors), _ATTENTION
    )
    stored = stored_shapes(family, module, job.tensors)
    check_tensors(module, stored, job.tensors)
    trace = _forward(module, config)
    used = [tensor for name in trace.parameters for tensor in stored.get(name, {}) if tensor in job.tensors]
    if unused := sorted(set(job.tensors) - set(used)):
        raise artifact_rejected(unused[0], "no forward of this architecture uses it")
    return _facts(values["architectures"][0], dtype_name, config, trace, tuple(used))


def read_config_values(config_json: str) -> dict[str, Any]:
    """Return the config's object. Raises `Refused` if it has a forbidden key."""
    try:
        values = decoder(dict[str, Any]).decode(config_json)
    except BadJson as error:
        raise artifact_rejected(CONFIG, f"is not a JSON object: {error}") from error
    for key, reason in _FORBIDDEN.items():
        if values.get(key) not in (None, False):
            raise artifact_rejected(CONFIG, f"'{key}': {reason}")
    return values


def find_family(values: dict[str, Any], served: Mapping[str, Family]) -> Family:
    """Return the family in `served` that the config names. Raises `Refused`."""
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or names[0] not in served:
        raise artifact_rejected(CONFIG, f"architectures={names!r}: must be one of {', '.join(sorted(served))}")
    family = served[names[0]]
    if values.get("model_type", family.model_type) != family.model_type:
        raise artifact_rejected(
            CONFIG, f"model_type={values['model_type']!r}: must be '{family.model_type}' for {names[0]}"
        )
    return family


def find_dtype(values: dict[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Return the version's dtype: the config's, or else the tensors' own. Raises `Refused` unless all tensors have it,
    because a conversion would make a copy of unverified bytes.
    """
    stated = values.get("dtype") or values.get("torch_dtype")
    if stated is None and tensors:
        first = _ST_DTYPES.get(next(iter(tensors.values()))[0])
        stated = next((name for name, dtype in TORCH_DTYPES.items() if dtype == first), None)
    if not isinstance(stated, str) or stated not in TORCH_DTYPES:
        raise artifact_rejected(CONFIG, f"dtype={stated!r}: must be one of {', '.join(sorted(TORCH_DTYPES))}")
    for name, (stored, _) in tensors.items():
        if _ST_DTYPES.get(stored) != TORCH_DTYPES[stated]:
            raise artifact_rejected(name, f"is stored as {stored}, but the model computes in {stated}")
    return stated


def build_meta_skeleton(
    family: Family, config_json: str, dtype: torch.dtype, max_layers: int, attention: str
) -> tuple[nn.Module, PreTrainedConfig]:
    """Return the model's modules without weights, and its config. Raises `Refused`."""
    try:
        config = parse_config(family, config_json.encode(), dtype)
    except Exception as error:  # the library's validation raises exceptions of any type
        raise artifact_rejected(CONFIG, f"is refused by its class: {public_message(error)}") from error
    # Every layer has tensors. A config that claims more layers would only cost time and memory.
    if not 0 < config.num_hidden_layers <= max_layers:
        rule = f"the files hold {max_layers} tensors"
        raise artifact_rejected(CONFIG, f"num_hidden_layers={config.num_hidden_layers}: {rule}")
    positions = getattr(config, "max_position_embeddings", 1)
    if not 0 < positions <= _MAX_POSITIONS:
        raise artifact_rejected(CONFIG, f"max_position_embeddings={positions}: 1 to {_MAX_POSITIONS} are served")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # for all layers, or one per kind of layer
        if isinstance(parameters, dict):
            _check_rope(parameters)
    config._attn_implementation = attention
    if family.fusions:
        config._experts_implementation = "batched_mm"  # the only one that computes on meta, because it needs no values
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):  # also for buffers, because a config may claim any size
            return family.model(config).eval(), config
    except Exception as error:
        raise artifact_rejected(CONFIG, f"does not make a model: {public_message(error)}") from error
    finally:
        torch.set_default_dtype(previous_dtype)


def _check_rope(parameters: Mapping[str, object]) -> None:
    rope_type = parameters.get("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in _ROPE_TYPES:
        raise artifact_rejected(
            CONFIG, f"rope_type={str(rope_type)[:80]!r}: must be one of {', '.join(sorted(_ROPE_TYPES))}"
        )
    for name in _ROPE_POSITIVE:  # frequencies are quotients of these
        value = parameters.get(name)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise artifact_rejected(CONFIG, f"{name}={str(value)[:80]}: must be a number above 0")


def stored_shapes(
    family: Family, module: nn.Module, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return by parameter the names and shapes of its stored tensors: itself, or the matrices that are fused."""
    stored: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shape = tuple(parameter.shape)
        fusion = None if name in tensors else family.find_fusion(name)
        if fusion is not None and shape[0] > len(tensors):  # each expert has tensors, as each layer does
            raise artifact_rejected(CONFIG, f"{shape[0]} experts: the files hold {len(tensors)} tensors")
        stored[name] = {name: shape} if fusion is None else dict(fusion.stored_matrices(name, shape))
    return stored


def check_tensors(
    module: nn.Module,
    stored: Mapping[str, Mapping[str, tuple[int, ...]]],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
) -> None:
    """Raise `Refused` unless names and shapes match the skeleton. One of two tied tensors may be absent."""
    expected = {name: shape for shapes in stored.values() for name, shape in shapes.items()}
    tied: Mapping[str, str] = module.all_tied_weights_keys  # type: ignore[assignment]
    tied_partner = {**tied, **{source: target for target, source in tied.items()}}
    for name, (_, shape) in tensors.items():
        if name not in expected:
            raise artifact_rejected(name, "this architecture has no such tensor")
        if expected[name] != tuple(shape):
            raise artifact_rejected(name, f"has shape {list(shape)}, but the config means {list(expected[name])}")
    for name in expected:
        if name not in tensors and tied_partner.get(name) not in tensors:
            raise artifact_rejected(name, "is missing")


@dataclass(slots=True)
class _ForwardTrace:
    """The observations of one forward."""

    calls: list["_AttentionCall"] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)  # in the order of first use
    logits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """One attention call: its head count and widths, and what is wrong with it."""

    layer: object
    kv_heads: int
    head_dim: int
    value_dim: int
    fault: str | None


@contextmanager
def record_parameter_order(module: nn.Module) -> Iterator[list[str]]:
    """Yield a list that collects parameter names in the order in which a forward inside the block first uses them."""
    used: list[str] = []
    hooks = []
    for prefix, child in module.named_modules():
        leaves = [leaf for leaf, parameter in child._parameters.items() if parameter is not None]
        names = [f"{prefix}.{leaf}" if prefix else leaf for leaf in leaves]
        if names:

            def record_names(*_: object, names: list[str] = names) -> None:
                used.extend(name for name in names if name not in used)

            hooks.append(child.register_forward_pre_hook(record_names))
    try:
        yield used
    finally:
        for hook in hooks:
            hook.remove()


def _forward(module: nn.Module, config: PreTrainedConfig) -> _ForwardTrace:
    trace = _ForwardTrace()
    for child in module.modules():
        setattr(child, _RECORDER, trace.calls)
    with record_parameter_order(module) as trace.parameters:
        try:
            with torch.inference_mode(), torch.device("meta"):
                positions = torch.arange(TRACED_TOKENS)[None]
                rows = torch.tensor(_ROWS)
                answer = module(input_ids=positions, position_ids=positions, use_cache=False, logits_to_keep=rows)
            trace.logits = tuple(answer.logits.shape)
        except Exception as error:
            raise artifact_rejected(CONFIG, f"a forward without weights fails: {public_message(error)}") from error
    _check_attention_calls(trace, config)
    return trace


def _record(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    fault = None
    if attention_mask is not None:
        fault = "attention that needs a mask"
    elif query.shape[1] % key.shape[1] or key.shape[:3] != value.shape[:3] or query.shape[2] != TRACED_TOKENS:
        fault = f"attention over shapes {list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
    elif kwargs.get("scaling") is None:
        fault = "attention without a scale"
    elif not (kwargs.get("is_causal", True) and getattr(module, "is_causal", True)):
        fault = "attention that is not causal"
    elif kwargs.get("dropout"):
        fault = "attention with dropout"
    elif (window := kwargs.get("sliding_window")) is not None and window < 1:
        fault = "a window that is not positive"
    for name, argument in kwargs.items():
        if argument is not None and name not in _SUPPORTED_ARGUMENTS and name not in _IGNORED_ARGUMENTS:
            fault = f"attention with '{name}'"
    calls: list[_AttentionCall] = getattr(module, _RECORDER)
    calls.append(_AttentionCall(getattr(module, "layer_idx", None), key.shape[1], key.shape[3], value.shape[3], fault))
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _check_attention_calls(trace: _ForwardTrace, config: PreTrainedConfig) -> None:
    for call in trace.calls:
        if call.fault is not None:
            raise artifact_rejected(CONFIG, f"layer {call.layer} has {call.fault}, which this engine does not compute")
    layers = [call.layer for call in trace.calls]
    if layers != list(range(config.num_hidden_layers)):
        raise artifact_rejected(
            CONFIG, f"of {config.num_hidden_layers} layers, {len(set(layers))} attend through this engine"
        )
    if len({(call.kv_heads, call.head_dim, call.value_dim) for call in trace.calls}) != 1:
        raise artifact_rejected(CONFIG, "layers differ in the shape of their keys and values")
    if trace.logits != (1, len(_ROWS), config.vocab_size):
        raise artifact_rejected(CONFIG, f"logits have shape {list(trace.logits)}")


def _facts(
    architecture: str, dtype: str, config: PreTrainedConfig, trace: _ForwardTrace, used: tuple[str, ...]
) -> GateFacts:
    call = trace.calls[0]
    return GateFacts(
        architecture=architecture,
        dtype=dtype,
        layers=config.num_hidden_layers,
        kv_heads=call.kv_heads,
        head_dim=call.head_dim,
        value_dim=call.value_dim,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        kv_bytes_per_token=(
            config.num_hidden_layers * call.kv_heads * (call.head_dim + call.value_dim) * TORCH_DTYPES[dtype].itemsize
        ),
        first_use=used,
    )
