"""Known answers are recorded by the library, and separate the right model from a wrong one."""

import msgspec
import pytest
import torch

from kelvin.contracts.artifacts.runtime_control import Probe
from kelvin.contracts.wire import decode, encode
from runtime.models.attention_hook import ATTENTION
from runtime.models.probe import PROBE_TOKENS, TOP_LOGITS, probe_ids, record, verify
from tests.runtime.tiny_decoders import TinyModel, tiny

PROBE = Probe(
    token_ids=(5, 6),
    top_ids=((3, 1), (0, 2)),
    top_logits=((4.0, 1.0), (2.0, 1.9)),
    tolerance=0.25,
)
RIGHT = [[0.5, 1.0, 0.0, 4.0], [2.0, 0.0, 1.9, 1.0]]


def changed(position: int, token: int, value: float) -> torch.Tensor:
    logits = torch.tensor(RIGHT)
    logits[position, token] = value
    return logits


@pytest.mark.parametrize(
    ("logits", "want"),
    [
        pytest.param(torch.tensor(RIGHT), None, id="the same logits"),
        pytest.param(changed(0, 3, 4.2), None, id="a logit within the tolerance"),
        pytest.param(changed(1, 2, 2.1), None, id="another id leads where the reference's lead is small"),
        pytest.param(changed(0, 3, 4.3), "position 0 is off by 0.3, tolerance 0.25", id="a logit beyond it"),
        pytest.param(changed(1, 2, 1.5), "position 1 is off by 0.4, tolerance 0.25", id="a lower one too"),
        pytest.param(changed(0, 0, 4.1), "position 0 is off by 3.1, tolerance 0.25", id="an id from nowhere leads"),
        pytest.param(changed(1, 3, 2.0), None, id="an id from nowhere within the tolerance"),
        pytest.param(changed(0, 2, float("nan")), "logits that are not finite", id="a NaN anywhere"),
        pytest.param(changed(1, 1, -torch.inf), "logits that are not finite", id="an infinity anywhere"),
        pytest.param(torch.tensor(RIGHT[:1]), "1 positions instead of 2", id="too few positions"),
        pytest.param(torch.zeros(2, 3), "a vocabulary of 3", id="a smaller vocabulary"),
    ],
)
def test_verify(logits: torch.Tensor, want: str | None) -> None:
    """A mismatch is reported with its size."""
    assert verify(PROBE, logits) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2 with windows"])
def test_recorded_answers_match_the_library(name: str, dtype: torch.dtype) -> None:
    """Eight positions with their highest logits in order, which the library matches with either attention."""
    bound = tiny(name, dtype).bound("library")
    probe = record(bound)
    assert len(probe.token_ids) == len(probe.top_ids) == len(probe.top_logits) == PROBE_TOKENS
    for ids, values in zip(probe.top_ids, probe.top_logits, strict=True):
        assert len(set(ids)) == len(values) == TOP_LOGITS
        assert list(values) == sorted(values, reverse=True)
    assert bound.config._attn_implementation == ATTENTION
    for attention in ("sdpa", "eager"):
        bound.config._attn_implementation = attention
        with torch.inference_mode():
            logits = bound.module(input_ids=torch.tensor([probe.token_ids]), use_cache=False).logits[0]
        assert verify(probe, logits) is None


def test_recording_twice_gives_the_same() -> None:
    assert record(tiny("llama").bound("library")) == record(tiny("llama").bound("fast"))


def test_probe_survives_json() -> None:
    """A probe survives JSON to the last bit."""
    probe = record(tiny("llama", torch.bfloat16).bound("library"))
    assert decode(encode(probe), Probe) == probe


def test_ids_fit_any_vocabulary() -> None:
    """Ids are within the vocabulary, spread over it, and always the same."""
    assert all(0 <= token < 97 for token in probe_ids(97))
    assert len(set(probe_ids(32_000))) == PROBE_TOKENS
    assert max(probe_ids(32_000)) - min(probe_ids(32_000)) > 16_000


def test_a_model_without_answers_is_not_recorded() -> None:
    model = tiny("llama")
    broken = {**model.tensors, "model.norm.weight": torch.full((32,), float("nan"))}
    with pytest.raises(ValueError, match="not finite"):
        record(TinyModel(model.config_json, broken, model.dtype).bound("library"))


def test_another_models_answers_are_noticed() -> None:
    """Negative control: another model's logits miss by far."""
    probe = record(tiny("llama").bound("library"))
    other = record(tiny("llama3 rope").bound("library"))
    assert probe.token_ids == other.token_ids
    bound = tiny("llama3 rope").bound("library")
    bound.config._attn_implementation = "sdpa"
    with torch.inference_mode():
        logits = bound.module(input_ids=torch.tensor([probe.token_ids]), use_cache=False).logits[0]
    assert verify(other, logits) is None
    assert verify(probe, logits) is not None
    loose = msgspec.structs.replace(probe, tolerance=1e9)
    assert verify(loose, logits) is None
