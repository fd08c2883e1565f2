"""Warming up leaves nothing behind but warmth, and tells a process that computes wrongly."""

import pytest
import torch

from contracts.control import Probe
from runtime import probe
from runtime.binding import BoundModel
from runtime.engine.warm import warm_up
from tests.runtime.engine.models import CPU, engine, greedy, prompts, reference, run_dry, tokens_of


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_is_left(dtype: str) -> None:
    """The default dtype is as before, and an engine made afterwards answers as ever."""
    before = torch.get_default_dtype()
    warm_up(CPU, dtype)
    assert torch.get_default_dtype() == before
    machine = engine()
    assert machine.admit(greedy("a", prompts()[3])) is None
    assert tokens_of(run_dry(machine), "a") == reference("llama", prompts()[3])


def test_a_process_that_computes_wrongly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own probe does not match: it raises instead of waiting for a version."""
    record = probe.record

    def wrong(bound: BoundModel) -> Probe:
        known = record(bound)
        return Probe(
            token_ids=known.token_ids,
            top_ids=known.top_ids,
            top_logits=tuple(tuple(value + 100 for value in row) for row in known.top_logits),
            tolerance=known.tolerance,
        )

    monkeypatch.setattr(probe, "record", wrong)
    with pytest.raises(RuntimeError, match="computes wrongly"):
        warm_up(CPU)
