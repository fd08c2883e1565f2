"""Tiny random models of every served family, engines over them, and reference tokens by transformers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import GenerationConfig

from kelvin.contracts.artifacts.manifest import Engine as EngineOf
from kelvin.contracts.artifacts.manifest import Limits, Manifest
from kelvin.contracts.artifacts.runtime_control import GateFacts, GateJob, Probe
from kelvin.contracts.errors import Failure
from runtime.drivers.interface import Event, Failed, Finished, Generated, GenerationRequest, Sampling
from runtime.drivers.native.engine import ModelEngine
from runtime.models.architecture_gate import check_architecture
from runtime.models.binding import TORCH_DTYPES, BindMethod, BoundModel, bind
from runtime.models.families import SERVED

torch.set_num_threads(1)

CPU = torch.device("cpu")
VOCAB = 97
NEW = 24  # tokens of a reference
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # logits and attention are far from flat, so that a wrong key shows
    "eos_token_id": None,
    "bos_token_id": None,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_COMMON, "architectures": ["LlamaForCausalLM"]},
    "llama tied": {**_COMMON, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "llama3 rope": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {**_COMMON, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen2 with windows": {
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen3": {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "head_dim": 8, "tie_word_embeddings": True},
    "mistral": {**_COMMON, "architectures": ["MistralForCausalLM"], "sliding_window": 20},
    "gemma3": {
        **_COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "final_logit_softcapping": 30.0,
    },
    "qwen3 moe": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 8,
        "moe_intermediate_size": 32,  # an expert's matrix is a page in float32, and less in 16 bits
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
_ST_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class TinyModel:
    """A model's files as the runtime meets them."""

    config_json: bytes
    tensors: dict[str, torch.Tensor]
    dtype: torch.dtype

    @property
    def architecture(self) -> str:
        name: str = json.loads(self.config_json)["architectures"][0]
        return name

    @property
    def manifest(self) -> Manifest:
        dtype: Any = next(name for name, dtype in TORCH_DTYPES.items() if dtype == self.dtype)
        return Manifest(
            format=1,
            engine=EngineOf(1, self.architecture, dtype),
            limits=Limits(512, 512),
            chunk_bytes=8 << 20,
            files=(),
            tensors=(),
            chunks=(),
        )

    @property
    def job(self) -> GateJob:
        tensors = {name: (_ST_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        return GateJob(config_json=self.config_json.decode(), tensors=tensors)

    def bound(self, bind_method: BindMethod = "fast") -> BoundModel:
        return bind(
            self.manifest, self.config_json, self.tensors, bind_method=bind_method, dtype=self.dtype, device=CPU
        )

    def facts(self) -> GateFacts:
        return check_architecture(self.job)


@cache
def tiny(name: str, dtype: torch.dtype = torch.float32) -> TinyModel:
    """Return a tiny model with the same weights each time. Tests must not write to them."""
    family = SERVED[CONFIGS[name]["architectures"][0]]
    dtype_name = next(key for key, value in TORCH_DTYPES.items() if value == dtype)
    config = family.config(**CONFIGS[name], dtype=dtype_name)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = family.model(config).to(dtype)
    tied = getattr(model, "all_tied_weights_keys", {})
    state = {key: value.detach() for key, value in model.state_dict().items() if key not in tied}
    tensors = {key: value for name, whole in state.items() for key, value in as_stored(name, whole).items()}
    return TinyModel(json.dumps({**CONFIGS[name], "dtype": dtype_name}).encode(), tensors, dtype)


def as_stored(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a parameter as checkpoints store it: the parameter of all experts becomes one matrix per expert."""
    prefix, _, leaf = name.rpartition(".")
    if not prefix.endswith(".experts"):
        return {name: tensor}
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[leaf]
    return {
        f"{prefix}.{expert}.{part}.weight": rows.clone()
        for expert, matrix in enumerate(tensor)
        for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
    }


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Return prompts around block and window edges, and one of a single token."""
    generator = torch.Generator().manual_seed(11)
    lengths = (1, 2, 15, 16, 17, 33, 40, 70, 5, 9)
    return tuple(tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist()) for length in lengths)


@cache
def reference(name: str, prompt: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[int, ...]:
    """Return NEW greedy tokens by transformers' loader, attention and generate."""
    bound = tiny(name, dtype).bound("library")
    bound.config._attn_implementation = "eager"
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    generate: Any = bound.module.generate
    out = generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=settings)
    return tuple(out[0, len(prompt) :].tolist())


def engine(name: str = "llama", *, dtype: torch.dtype = torch.float32, blocks: int = 64, **options: Any) -> ModelEngine:
    """Return an engine over `tiny(name)` with this many blocks, and one for the probe."""
    model = tiny(name, dtype)
    facts = model.facts()
    probe: Probe | None = options.get("probe")
    kv_bytes = (blocks + (probe is not None)) * 16 * facts.kv_bytes_per_token
    options = {"version": "v" * 64, "device": CPU, "kv_bytes": kv_bytes, **options}
    return ModelEngine(options.pop("bound", None) or model.bound(), facts, **options)


def greedy(
    request_id: str, prompt: Sequence[int], max_tokens: int = NEW, *, stop: Sequence[int] = ()
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
        stop_ids=frozenset(stop),
    )


def tokens_of(events: Sequence[Event], request_id: str) -> tuple[int, ...]:
    return tuple(event.token_id for event in events if isinstance(event, Generated) and event.request_id == request_id)


def reason_of(events: Sequence[Event], request_id: str) -> str:
    (last,) = [event for event in events if isinstance(event, Finished) and event.request_id == request_id]
    return last.reason


def failures_of(events: Sequence[Event]) -> dict[str, Failure]:
    return {event.request_id: event.failure for event in events if isinstance(event, Failed)}
