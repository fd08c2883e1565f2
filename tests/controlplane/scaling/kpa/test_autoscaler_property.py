"""Autoscaler invariants for random histories: maximums hold, failed starts are spaced, requests are served, silence
ends at zero.
"""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.kpa.version_scaler import FAILURE_SPACING_S
from controlplane.scaling.policy.breakeven import Level, LevelChange
from tests.controlplane.scaling.autoscaler_fixture import FAST, AutoscalerScenario, replace_scale, running_autoscaler

SLOTS = 3
NAMES = ("a", "b", "c", "d")
MAXIMA = {"a": 1, "b": 2, "c": 1, "d": 3}
IDLE = {"a": "zero", "b": "auto", "c": "auto", "d": "zero"}

STEP = st.tuples(
    st.sampled_from(["report", "poke", "ready", "fail", "die", "drained", "stop", "wait", "wait"]),
    st.sampled_from(NAMES),
    st.sampled_from([0.0, 0.2, 1.0, 3.0, 250.0]),
)


async def _apply(w: AutoscalerScenario, keys: dict[str, VersionKey], step: str, name: str, size: float) -> None:
    which = keys[name]
    match step:
        case "report":
            w.report(which, size, int(size))
        case "poke":
            w.report(which)
        case "ready" if w.actuator.starting.get(which):
            w.actuator.become_ready(which)
        case "fail" if w.actuator.starting.get(which):
            w.actuator.fail(which)
        case "die" if w.actuator.serving.get(which):
            w.actuator.die(which)
        case "drained" if w.actuator.draining.get(which):
            w.actuator.drained(which)
        case "stop":
            w.scaler.stop((which,))
        case "wait":
            await w.clock.advance(min(size, 10.0) + 0.1)


def _check(w: AutoscalerScenario, keys: dict[str, VersionKey], failed_s: dict[VersionKey, float], started: int) -> None:
    w.scaler.check_integrity()
    for name, which in keys.items():
        assert w.actuator.live_count(which) <= MAXIMA[name], "over its maximum"
    assert sum(w.actuator.process_count(which) for which in keys.values()) - len(w.actuator.asleep) <= SLOTS
    now = w.clock.monotonic_us() / 1e6
    for which, _ in w.actuator.starts[started:]:
        assert now - failed_s.get(which, 0.0) >= FAILURE_SPACING_S, "a start right after a failure"


async def _play(steps: list[tuple[str, str, float]]) -> None:
    async with running_autoscaler(SLOTS) as w:
        w.plans.levels = (LevelChange(Level.WARM, 0.0), LevelChange(Level.ASLEEP, 4.0), LevelChange(Level.ZERO, 20.0))
        scales = {name: replace_scale(FAST, max=MAXIMA[name], idle=IDLE[name]) for name in NAMES}
        keys = {name: w.catalogue.add(name, scale) for name, scale in scales.items()}
        failed_s: dict[VersionKey, float] = {}
        for step, name, size in steps:
            started, fails = len(w.actuator.starts), step == "fail" and w.actuator.starting.get(keys[name])
            await _apply(w, keys, step, name, size)
            _check(w, keys, failed_s, started)
            if fails and w.actuator.live_count(keys[name]) == 0:
                failed_s[keys[name]] = w.clock.monotonic_us() / 1e6
        await _a_caller_is_served(w, keys["a"])
        await _silence_ends_at_zero(w, keys)


async def _a_caller_is_served(w: AutoscalerScenario, which: VersionKey) -> None:
    """Check that steady requests get a replica within seconds, once draining replicas have left and room can be
    made.
    """
    for _ in range(12):
        for each in list(w.actuator.starting):
            while w.actuator.starting[each]:
                w.actuator.become_ready(each)
        for each in list(w.actuator.draining):
            while w.actuator.draining[each]:
                w.actuator.drained(each)
        if w.actuator.ready_count(which):
            return
        w.report(which, 1.0, 0)
        await w.clock.advance(1.0)
    pytest.fail("the caller waits for ever")


async def _silence_ends_at_zero(w: AutoscalerScenario, keys: dict[str, VersionKey]) -> None:
    """Check that without requests every process is gone after the windows and graces."""
    for _ in range(40):
        await w.clock.advance(2.0)
        for which in keys.values():
            while w.actuator.starting.get(which):
                w.actuator.become_ready(which)
            while w.actuator.draining.get(which):
                w.actuator.drained(which)
    assert sum(w.actuator.process_count(which) for which in keys.values()) == 0


@settings(max_examples=150)
@given(st.lists(STEP, max_size=60))
def test_invariants_hold_for_any_history(steps: list[tuple[str, str, float]]) -> None:
    """The histories cover four versions on three slots."""
    asyncio.run(_play(steps))


def test_scaler_without_failure_pause_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the pause after a failed start, the spacing check fails."""
    monkeypatch.setattr(
        "controlplane.scaling.kpa.version_scaler.VersionScaler.record_failed_start", lambda *_, **__: None
    )
    with pytest.raises(AssertionError, match="right after a failure"):
        asyncio.run(_play([("poke", "a", 1.0), ("fail", "a", 1.0), ("poke", "a", 1.0)]))


def test_scaler_that_never_scales_to_zero_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a version that always wants a replica never reaches zero."""
    monkeypatch.setattr("controlplane.scaling.kpa.version_scaler.VersionScaler.decide", lambda *_, **__: 1)
    with pytest.raises(AssertionError):
        asyncio.run(_play([("poke", "a", 1.0), ("ready", "a", 1.0)]))
