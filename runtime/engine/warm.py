"""Run everything once on a model of nothing, while a standby waits for its version.

A forked process copies each page that it first writes to, and libraries prepare themselves at their first call: 18 ms
here, off the path of any request, save about 5 ms of a bind (12 -> 7) and 10-20 of the first forward.
"""

import json
from typing import Any, Final

import torch

from contracts.control import GateFacts
from contracts.manifest import Engine, Limits, Manifest
from runtime import probe
from runtime.binding import DTYPES, INTERFACE, SERVED, bind, parse_config, skeleton
from runtime.engine.core import ModelEngine
from runtime.engine.interface import GenerationRequest, Sampling

_TINY: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ARCHITECTURE: Final = "LlamaForCausalLM"


def warm_up(device: torch.device, dtype: str = "bfloat16") -> None:
    """Bind, prefill, decode, sample and probe; nothing is kept. Call it in the process that will serve, never in one
    that forks: computing may leave threads behind."""
    for name, family in SERVED.items():
        config_json = json.dumps({**_TINY, "architectures": [name]}).encode()
        module = skeleton(family, parse_config(family, config_json, DTYPES[dtype]))
        if name == _ARCHITECTURE:
            weights = {key: torch.ones(value.shape, dtype=DTYPES[dtype]) for key, value in module.named_parameters()}
            _serve(config_json, weights, dtype, device)


def _serve(config_json: bytes, weights: dict[str, torch.Tensor], dtype: Any, device: torch.device) -> None:
    manifest = Manifest(
        format=1,
        engine=Engine(INTERFACE, _ARCHITECTURE, dtype),
        limits=Limits(64, 64),
        chunk_bytes=1 << 20,
        files=(),
        tensors=(),
        chunks=(),
    )
    bound = bind(manifest, config_json, weights, how="fast", dtype=DTYPES[dtype], device=device)
    facts = GateFacts(
        architecture=_ARCHITECTURE,
        dtype=dtype,
        layers=1,
        kv_heads=2,
        head_dim=16,
        value_dim=16,
        vocab_size=64,
        max_positions=128,
        kv_bytes_per_token=2 * 32 * DTYPES[dtype].itemsize,
        first_use=(),
    )
    engine = ModelEngine(bound, facts, version="warm-up", kv_bytes=1 << 20, device=device, probe=probe.record(bound))
    for index, sampling in enumerate((Sampling(max_tokens=2, temperature=0.0), Sampling(max_tokens=2, top_k=5))):
        engine.admit(GenerationRequest(request_id=str(index), prompt_ids=tuple(range(20)), sampling=sampling))
    while engine.has_work:
        engine.step()
    if engine.poisoned is not None:
        raise RuntimeError(f"this process computes wrongly: {engine.poisoned.message}")
