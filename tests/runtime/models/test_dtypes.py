"""In 16 bits a restored model equals transformers' own: tensors bit by bit, logits within the tolerance."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from runtime.drivers.native.engine import ModelEngine
from runtime.models import probe as known_answers
from runtime.models.families import DECODERS
from tests.runtime.tiny_decoders import CONFIGS, CPU, TinyModel, tiny

NAMES = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "qwen3 moe"]


def saved(directory: Path, name: str, dtype: torch.dtype) -> TinyModel:
    """Return a checkpoint saved by transformers, as the files of a version."""
    model = tiny(name, dtype).bound("library").module
    model.config._attn_implementation = "eager"  # type: ignore[union-attr]
    model.save_pretrained(directory)  # type: ignore[operator]
    with safe_open(directory / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return TinyModel((directory / "config.json").read_bytes(), tensors, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_restored_model_matches_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The fast bind and the engine agree with `from_pretrained` of the same directory."""
    model = saved(tmp_path, name, dtype)
    fast = model.bound("fast")
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    mine = dict(fast.module.named_parameters())
    for key, parameter in own.named_parameters():
        assert mine[key].dtype == parameter.dtype == dtype
        assert torch.equal(mine[key], parameter), key

    facts = model.facts()
    probe = known_answers.record(model.bound("library"))
    with torch.inference_mode():
        logits = own(input_ids=torch.tensor([probe.token_ids])).logits[0]
    assert known_answers.verify(probe, logits) is None
    kv_bytes = 8 * 16 * facts.kv_bytes_per_token
    engine = ModelEngine(fast, facts, version="v" * 64, kv_bytes=kv_bytes, device=CPU, probe=probe)
    assert engine.run_probe_alone() is None
    assert not engine.needs_probe
    assert known_answers.verify(probe, logits + 2 * probe.tolerance) is not None  # negative control


def test_every_family_is_there() -> None:
    """Every served family is in these tests."""
    assert {CONFIGS[name]["architectures"][0] for name in NAMES} == set(DECODERS)
    assert {json.loads(tiny(name).config_json)["architectures"][0] for name in CONFIGS} == set(DECODERS)
