"""Where the last replica goes when nobody asks: by the model's setting, over virtual time."""

import asyncio

import pytest

from controlplane.policy.breakeven import Level, Step
from tests.controlplane.scaling_world import FAST, World, replace_scale, woken, world


def _play(idle: str, seconds: int, said: tuple[Step, ...] = (), **scale: float) -> tuple[int, bool, World]:
    """Ready replicas and whether one sleeps, so long after the last request (window 6 s, grace 2 s, asleep at 20)."""

    async def main() -> tuple[int, bool, World]:
        async with world() as w:
            w.plans.said = said or w.plans.said
            which = w.catalogue.add("m", replace_scale(FAST, idle=idle, **scale))
            await woken(w, which)
            await w.seconds(seconds)
            return w.actuator.ready(which), which in w.actuator.asleep, w

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("idle", "after_s", "ready", "asleep"),
    [
        pytest.param("zero", 4, 1, False, id="zero: the window first"),
        pytest.param("zero", 14, 0, False, id="zero: after window and grace nothing is left"),
        pytest.param("sleep", 4, 1, False, id="sleep: the same window"),
        pytest.param("sleep", 14, 0, True, id="sleep: after window and grace it sleeps"),
        pytest.param("sleep", 2000, 0, True, id="sleep: and goes on sleeping"),
        pytest.param("warm", 2000, 1, False, id="warm: it stays"),
        pytest.param("auto", 16, 1, False, id="auto: kept over window and grace, as that is cheaper"),
        pytest.param("auto", 24, 0, True, id="auto: asleep from its break-even on"),
        pytest.param("auto", 290, 0, True, id="auto: still"),
        pytest.param("auto", 306, 0, False, id="auto: zero from the next break-even on"),
    ],
)
def test_the_last_replica_goes_where_the_setting_says(idle: str, after_s: int, ready: int, asleep: bool) -> None:
    """And not before its time."""
    found_ready, found_asleep, w = _play(idle, after_s)
    assert (found_ready, found_asleep) == (ready, asleep)
    assert len(w.actuator.starts) == 1, "nothing was started for nobody"


DEEPER = (Step(Level.WARM, 0.0), Step(Level.ASLEEP, 20.0), Step(Level.ASLEEP2, 100.0), Step(Level.ZERO, 300.0))
AT_ONCE = (Step(Level.WARM, 0.0), Step(Level.ASLEEP2, 20.0))


@pytest.mark.parametrize(
    ("idle", "said", "after_s", "asleep", "empty"),
    [
        pytest.param("sleep2", (), 4, False, False, id="sleep2: the same window as for sleep"),
        pytest.param("sleep2", (), 14, True, True, id="sleep2: asleep by then, and without weights a tick later"),
        pytest.param("sleep2", (), 2000, True, True, id="sleep2: and so it goes on"),
        pytest.param("sleep", (), 2000, True, False, id="sleep: keeps them"),
        pytest.param("auto", DEEPER, 90, True, False, id="auto: asleep"),
        pytest.param("auto", DEEPER, 106, True, True, id="auto: without weights from the next break-even on"),
        pytest.param("auto", DEEPER, 306, False, False, id="auto: then zero"),
        pytest.param("auto", AT_ONCE, 26, True, True, id="auto: past a level that is never the cheapest"),
    ],
)
def test_weights_go_when_they_are_to(
    idle: str, said: tuple[Step, ...], after_s: int, asleep: bool, empty: bool
) -> None:
    """One process throughout; a caller wakes it from either sleep."""
    _, found_asleep, w = _play(idle, after_s, said)
    assert (found_asleep, bool(w.actuator.empty)) == (asleep, empty)
    assert len(w.actuator.starts) == 1


async def test_break_even_before_the_window_is_heeded() -> None:
    """A version that is cheap to start is given up at once, though the window's mean still remembers its traffic."""

    async with world() as w:
        w.plans.said = (Step(Level.WARM, 0.0), Step(Level.ZERO, 3.0))
        which = w.catalogue.add("m", replace_scale(FAST, idle="auto", window_s=60.0))
        await woken(w, which)
        await w.seconds(30, which, 5.0)
        assert w.actuator.ready(which) == 1
        await w.seconds(6)
        assert w.actuator.live(which) == 0
        await w.seconds(60)
        assert len(w.actuator.starts) == 1, "the window's mean starts nothing"
        w.report(which)
        assert len(w.actuator.starts) == 2


async def test_a_sleeper_wakes_for_a_caller_at_once() -> None:
    """Instead of another start; a minimum wakes it, too."""

    async with world() as w:
        which = w.catalogue.add("m", replace_scale(FAST, idle="sleep"))
        await woken(w, which)
        await w.seconds(14)
        assert which in w.actuator.asleep
        w.report(which)
        assert w.actuator.wakes == [which]
        w.actuator.become_ready(which)
        await w.seconds(14)
        w.catalogue.add("m", replace_scale(FAST, idle="sleep", min=1))
        await w.seconds(3)
        assert w.actuator.wakes == [which, which]


async def test_a_stop_and_another_setting_end_a_sleeper() -> None:
    """Zero means that no process is left."""

    async with world() as w:
        which = w.catalogue.add("m", replace_scale(FAST, idle="sleep"))
        await woken(w, which)
        await w.seconds(14)
        w.scaler.stop((which,))
        assert not w.actuator.asleep
        await woken(w, which)
        await w.seconds(14)
        assert w.actuator.asleep
        w.catalogue.add("m", FAST)
        await w.seconds(3)
        assert not w.actuator.asleep


async def test_two_replicas_are_the_autoscaler_s() -> None:
    """Only the last one has a choice."""

    async with world() as w:
        which = w.catalogue.add("m", replace_scale(FAST, idle="auto", max=3), max_streams=10)
        await woken(w, which)
        for _ in range(4):
            w.report(which, 15.0, 0)
            await w.clock.advance(1.0)
        while w.actuator.starting[which]:
            w.actuator.become_ready(which)
        assert w.actuator.ready(which) == 3
        await w.seconds(14)
        assert w.actuator.ready(which) == 1
        await w.seconds(14)
        assert which in w.actuator.asleep


async def test_a_sleeper_sleeps_on_where_it_would_be_warm_by_now() -> None:
    """Prices changed, or a control plane came back that doesn't know since when nobody asks: nothing is thrown away."""

    async with world() as w:
        which = w.catalogue.add("m", replace_scale(FAST, idle="auto"))
        await woken(w, which)
        await w.seconds(24)
        assert which in w.actuator.asleep
        w.plans.said = (Step(Level.WARM, 0.0), Step(Level.ZERO, 100.0))
        await w.seconds(20)
        assert which in w.actuator.asleep
        w.catalogue.add("m", replace_scale(FAST, idle="warm"))
        await w.seconds(20)
        assert which in w.actuator.asleep
        w.catalogue.add("m", replace_scale(FAST, idle="auto"))
        await w.seconds(60)
        assert which not in w.actuator.asleep
        assert len(w.actuator.starts) == 1


async def test_a_failure_beside_it_keeps_no_sleeper_for_ever() -> None:
    """One of two starts failed, the other served: what follows its sleep follows all the same."""

    async with world() as w:
        which = w.catalogue.add("m", replace_scale(FAST, idle="auto", max=2), max_streams=10)
        for _ in range(4):
            w.report(which, 15.0, 0)
            await w.clock.advance(1.0)
        assert w.actuator.starting[which] == 2
        w.actuator.become_ready(which)
        w.actuator.fail(which)
        await w.seconds(28)
        assert which in w.actuator.asleep
        await w.seconds(300)
        assert which not in w.actuator.asleep


async def test_pauses_are_remembered() -> None:
    """Those of two seconds and more, also across a time at zero."""

    async with world() as w:
        which = w.catalogue.add("m", FAST)
        await woken(w, which)
        await w.seconds(30)
        await woken(w, which)
        await w.seconds(1)
        w.report(which)
        assert [round(gap_s) for gap_s in w.scaler.gaps.of(which)] == [30]
