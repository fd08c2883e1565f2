"""Where the last replica goes without requests: by the model's `idle` setting, on virtual time."""

import pytest

from controlplane.scaling.policy.breakeven import Level, LevelChange
from tests.controlplane.scaling.autoscaler_fixture import (
    FAST,
    AutoscalerScenario,
    replace_scale,
    running_autoscaler,
    wake_version,
)


async def _be_idle(
    idle: str, idle_s: int, levels: tuple[LevelChange, ...] = ()
) -> tuple[int, bool, AutoscalerScenario]:
    """Return the number of ready replicas, and whether one sleeps, `idle_s` seconds after the last request. Window 6 s,
    grace 2 s; the default plan sleeps at 20 s.
    """
    async with running_autoscaler() as w:
        w.plans.levels = levels or w.plans.levels
        which = w.catalogue.add("m", replace_scale(FAST, idle=idle))
        await wake_version(w, which)
        await w.pass_seconds(idle_s)
        return w.actuator.ready_count(which), which in w.actuator.asleep, w


@pytest.mark.parametrize(
    ("idle", "after_s", "ready", "asleep"),
    [
        pytest.param("zero", 4, 1, False, id="zero: it stays through the window"),
        pytest.param("zero", 14, 0, False, id="zero: it ends after window and grace"),
        pytest.param("sleep", 4, 1, False, id="sleep: it stays through the window"),
        pytest.param("sleep", 14, 0, True, id="sleep: after window and grace it sleeps"),
        pytest.param("sleep", 2000, 0, True, id="sleep: it keeps sleeping"),
        pytest.param("warm", 2000, 1, False, id="warm: it stays"),
        pytest.param("auto", 16, 1, False, id="auto: kept over window and grace, because that is cheaper"),
        pytest.param("auto", 24, 0, True, id="auto: asleep from the break-even on"),
        pytest.param("auto", 290, 0, True, id="auto: still asleep before the next break-even"),
        pytest.param("auto", 306, 0, False, id="auto: zero from the next break-even on"),
    ],
)
async def test_last_replica_follows_the_idle_setting(idle: str, after_s: int, ready: int, asleep: bool) -> None:
    found_ready, found_asleep, w = await _be_idle(idle, after_s)
    assert (found_ready, found_asleep) == (ready, asleep)
    assert len(w.actuator.starts) == 1, "no replica starts without a request"


DEEPER = (
    LevelChange(Level.WARM, 0.0),
    LevelChange(Level.ASLEEP, 20.0),
    LevelChange(Level.DEEP_SLEEP, 100.0),
    LevelChange(Level.ZERO, 300.0),
)
AT_ONCE = (LevelChange(Level.WARM, 0.0), LevelChange(Level.DEEP_SLEEP, 20.0))


@pytest.mark.parametrize(
    ("idle", "levels", "after_s", "asleep", "without_weights"),
    [
        pytest.param("sleep2", (), 4, False, False, id="sleep2: it stays through the window"),
        pytest.param("sleep2", (), 14, True, True, id="sleep2: asleep, and without weights a tick later"),
        pytest.param("sleep2", (), 2000, True, True, id="sleep2: it keeps sleeping without weights"),
        pytest.param("sleep", (), 2000, True, False, id="sleep: it keeps its weights"),
        pytest.param("auto", DEEPER, 90, True, False, id="auto: asleep with weights"),
        pytest.param("auto", DEEPER, 106, True, True, id="auto: without weights from the next break-even on"),
        pytest.param("auto", DEEPER, 306, False, False, id="auto: zero from the last break-even on"),
        pytest.param("auto", AT_ONCE, 26, True, True, id="auto: a level that is never the cheapest is skipped"),
    ],
)
async def test_weights_are_released_at_their_time(
    idle: str, levels: tuple[LevelChange, ...], after_s: int, asleep: bool, without_weights: bool
) -> None:
    """The replica is one process throughout."""
    _, found_asleep, w = await _be_idle(idle, after_s, levels)
    assert (found_asleep, bool(w.actuator.without_weights)) == (asleep, without_weights)
    assert len(w.actuator.starts) == 1


async def test_break_even_applies_before_the_window_ends() -> None:
    """A version that is cheap to start ends at its break-even, although the window's average still has its traffic."""
    async with running_autoscaler() as w:
        w.plans.levels = (LevelChange(Level.WARM, 0.0), LevelChange(Level.ZERO, 3.0))
        which = w.catalogue.add("m", replace_scale(FAST, idle="auto", window_s=60.0))
        await wake_version(w, which)
        await w.pass_seconds(30, which, 5.0)
        assert w.actuator.ready_count(which) == 1
        await w.pass_seconds(6)
        assert w.actuator.live_count(which) == 0
        await w.pass_seconds(60)
        assert len(w.actuator.starts) == 1, "the window's mean starts nothing"
        w.report(which)
        assert len(w.actuator.starts) == 2


async def test_sleeping_replica_wakes_for_a_request() -> None:
    """It wakes instead of a new start. A minimum wakes it, too."""
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, idle="sleep"))
        await wake_version(w, which)
        await w.pass_seconds(14)
        assert which in w.actuator.asleep
        w.report(which)
        assert w.actuator.woken_versions == [which]
        w.actuator.become_ready(which)
        await w.pass_seconds(14)
        w.catalogue.add("m", replace_scale(FAST, idle="sleep", min=1))
        await w.pass_seconds(3)
        assert w.actuator.woken_versions == [which, which]


async def test_stop_or_zero_setting_ends_a_sleeping_replica() -> None:
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, idle="sleep"))
        await wake_version(w, which)
        await w.pass_seconds(14)
        w.scaler.stop((which,))
        assert not w.actuator.asleep
        await wake_version(w, which)
        await w.pass_seconds(14)
        assert w.actuator.asleep
        w.catalogue.add("m", FAST)
        await w.pass_seconds(3)
        assert not w.actuator.asleep


async def test_only_the_last_replica_sleeps() -> None:
    """Of three replicas two end, and the last one sleeps."""
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, idle="auto", max=3), max_streams=10)
        await wake_version(w, which)
        for _ in range(4):
            w.report(which, 15.0, 0)
            await w.clock.advance(1.0)
        while w.actuator.starting[which]:
            w.actuator.become_ready(which)
        assert w.actuator.ready_count(which) == 3
        await w.pass_seconds(14)
        assert w.actuator.ready_count(which) == 1
        await w.pass_seconds(14)
        assert which in w.actuator.asleep


async def test_sleeping_replica_stays_asleep_after_price_change() -> None:
    """Neither a new plan that skips sleep nor the setting `warm` ends or wakes the sleeper. It ends when `auto` reaches
    zero.
    """
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, idle="auto"))
        await wake_version(w, which)
        await w.pass_seconds(24)
        assert which in w.actuator.asleep
        w.plans.levels = (LevelChange(Level.WARM, 0.0), LevelChange(Level.ZERO, 100.0))
        await w.pass_seconds(20)
        assert which in w.actuator.asleep
        w.catalogue.add("m", replace_scale(FAST, idle="warm"))
        await w.pass_seconds(20)
        assert which in w.actuator.asleep
        w.catalogue.add("m", replace_scale(FAST, idle="auto"))
        await w.pass_seconds(60)
        assert which not in w.actuator.asleep
        assert len(w.actuator.starts) == 1


async def test_failed_start_does_not_keep_a_replica_asleep() -> None:
    """One of two starts failed and the other served. The sleeper still ends at its break-even."""
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, idle="auto", max=2), max_streams=10)
        for _ in range(4):
            w.report(which, 15.0, 0)
            await w.clock.advance(1.0)
        assert w.actuator.starting[which] == 2
        w.actuator.become_ready(which)
        w.actuator.fail(which)
        await w.pass_seconds(28)
        assert which in w.actuator.asleep
        await w.pass_seconds(300)
        assert which not in w.actuator.asleep


async def test_idle_gaps_are_remembered() -> None:
    """Gaps of two seconds and more are kept, also across a time at zero."""
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", FAST)
        await wake_version(w, which)
        await w.pass_seconds(30)
        await wake_version(w, which)
        await w.pass_seconds(1)
        w.report(which)
        assert [round(gap_s) for gap_s in w.scaler.idle_gaps.gaps_of(which)] == [30]
