"""Over days, starts find more in memory with foresight than without, and little is brought in vain."""

import random
from pathlib import Path

import pytest

from tests.controlplane.policy.foresight_simulation import DAY, Model, Outcome, replayed, simulate, synthetic

TRACES = Path(__file__).parents[4] / "shared" / "traces" / "servegen"
DAYS = 3
SLABS = 60
BEAT_S = 300.0


def both(models: list[Model], slabs: int, until_s: float, beat_s: float = BEAT_S) -> tuple[Outcome, Outcome]:
    """Without and with."""
    plain, ahead = (
        simulate(models, slabs, foresee=foresee, until_s=until_s, beat_s=beat_s) for foresee in (False, True)
    )
    assert (plain.brought, ahead.starts, ahead.refused) == (0, plain.starts, plain.refused)
    return plain, ahead


def test_on_mixed_days() -> None:
    """Three times as many starts find all in memory, and of ten slabs that are brought eight are used."""
    plain, ahead = both(synthetic(1, DAYS), SLABS, DAYS * DAY)
    assert ahead.hot_share > 3 * plain.hot_share
    assert ahead.wasted_share < 0.2


def test_control() -> None:
    """Negative control: where calls come whenever they like, nothing is won, and little is brought for it."""
    models = [model for model in synthetic(3, DAYS) if model.name.startswith("random")]
    plain, ahead = both(models, 20, DAYS * DAY)
    assert ahead.hot_share < plain.hot_share + 0.1


@pytest.mark.deep
@pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES.name}")
@pytest.mark.parametrize("share", [0.5, 0.7, 0.85])
def test_on_recorded_traces(capsys: pytest.CaptureFixture[str], share: float) -> None:
    """Two weeks of clients of a served model, as if each were a model, in a tier that has room for this share of them:
    they have hardly a rhythm, and nothing is lost by looking for one.
    """
    models = replayed(TRACES, random.Random(1))
    plain, ahead = both(models, int(sum(model.slabs for model in models) * share), 14 * DAY, 600.0)
    with capsys.disabled():
        print(
            f"\n{len(models)} models, room for {share:.0%}: of {plain.starts} starts {plain.hot_share:.1%} hot, "
            f"with foresight {ahead.hot_share:.1%}; {ahead.brought} slabs brought, {ahead.wasted_share:.0%} in vain"
        )
    assert ahead.hot_share > plain.hot_share - 0.02
