"""In 16 bits, too, a restored model is transformers' own: its tensors bit for bit, its logits within the tolerance."""

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
    """A checkpoint as transformers writes it, and the same files as a version would have them."""
    model = tiny(name, dtype).bound("library").module
    model.config._attn_implementation = "eager"  # type: ignore[union-attr]
    model.save_pretrained(directory)  # type: ignore[operator]
    with safe_open(directory / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return TinyModel((directory / "config.json").read_bytes(), tensors, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_restored_model_matches_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """By the fast way and through the engine, against `from_pretrained` of the same directory."""
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
    assert known_answers.verify(probe, logits + 2 * probe.tolerance) is not None  # the control


def test_every_family_is_there() -> None:
    """No family is served without its row in these tests."""
    assert {CONFIGS[name]["architectures"][0] for name in NAMES} == set(DECODERS)
    assert {json.loads(tiny(name).config_json)["architectures"][0] for name in CONFIGS} == set(DECODERS)
