"""A control plane that has just started ends no replica: missing reports do not yet mean that a replica is idle."""

from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.policy.breakeven import Level, LevelChange
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.replicas import Replica
from kelvin.contracts.serving.control_messages import Stats
from tests.controlplane.scaling.autoscaler_fixture import FAST, AutoscalerScenario, replace_scale, running_autoscaler


def adopt(w: AutoscalerScenario, which: VersionKey, count: int) -> None:
    """Adopt `count` replicas one after the other, as each answers."""
    for number in range(count):
        w.actuator.serving[which] = number + 1
        w.scaler.on_replica_ready(Replica(f"r{number}", ReplicaState.READY, 0, key=which))


async def test_takeover_keeps_replicas_for_a_stable_window() -> None:
    """Three adopted replicas stay through the window without reports. Then the idle ones leave."""

    async with running_autoscaler(started_ago_s=0.0) as w:
        which = w.catalogue.add("m", replace_scale(FAST, max=4, window_s=20.0))
        adopt(w, which, 3)
        await w.pass_seconds(19)
        assert w.actuator.live_count(which) == 3
        await w.pass_seconds(60)
        assert w.actuator.live_count(which) == 0


async def test_takeover_waits_for_the_load_of_every_activator() -> None:
    """One of two activators reports a third of the load. The replicas with the other one's streams stay."""

    async with running_autoscaler(started_ago_s=0.0) as w:
        which = w.catalogue.add("m", replace_scale(FAST, max=4, window_s=20.0), max_streams=10)
        adopt(w, which, 3)
        await w.pass_seconds(15, which, 5.0)
        assert w.actuator.live_count(which) == 3


async def test_takeover_makes_no_room_before_all_reports() -> None:
    """A version with requests waits for a slot until every activator has reported that the running replica is idle."""

    async with running_autoscaler(slots=1, started_ago_s=0.0) as w:
        which = w.catalogue.add("m", replace_scale(FAST, window_s=60.0))
        other = w.catalogue.add("n", FAST)
        adopt(w, which, 1)
        with w.feed.subscribe("activator-0"), w.feed.subscribe("activator-1"):
            await w.pass_seconds(10, other, 1.0)
            assert w.actuator.live_count(which) == 1, "activator-1 may have streams there"
            w.scaler.observe(Stats(activator="activator-1", stats=()))
            await w.pass_seconds(3, other, 1.0)
            assert w.actuator.live_count(which) == 0


async def test_takeover_makes_no_room_while_no_activator_is_back() -> None:
    """A feed without readers does not mean that there is no activator. Room is made after a stable window."""

    async with running_autoscaler(slots=1, started_ago_s=0.0) as w:
        which = w.catalogue.add("m", replace_scale(FAST, window_s=60.0))
        other = w.catalogue.add("n", FAST)
        adopt(w, which, 1)
        await w.pass_seconds(30, other, 1.0)
        assert w.actuator.live_count(which) == 1
        await w.pass_seconds(40, other, 1.0)
        assert w.actuator.live_count(which) == 0, "a stable window has passed"


async def test_takeover_puts_nothing_to_sleep_before_reports() -> None:
    """Break-even counts from the last request, which a new control plane does not know."""

    async with running_autoscaler(started_ago_s=0.0) as w:
        w.plans.levels = (LevelChange(Level.WARM, 0.0), LevelChange(Level.ASLEEP, 3.0))
        which = w.catalogue.add("m", replace_scale(FAST, idle="auto", window_s=30.0))
        adopt(w, which, 1)
        await w.pass_seconds(29)
        assert w.actuator.live_count(which) == 1
        await w.pass_seconds(5)
        assert which in w.actuator.asleep


async def test_takeover_applies_break_even_after_all_reports() -> None:
    """This includes zero: break-even counts from the last request, so the window's average is not needed."""

    async with running_autoscaler(started_ago_s=0.0) as w:
        w.plans.levels = (LevelChange(Level.WARM, 0.0), LevelChange(Level.ZERO, 3.0))
        which = w.catalogue.add("m", replace_scale(FAST, idle="auto", window_s=60.0))
        used = w.catalogue.add("n", replace_scale(FAST, idle="auto", window_s=60.0))
        adopt(w, which, 1)
        adopt(w, used, 1)
        with w.feed.subscribe("activator-0"), w.feed.subscribe("activator-1"):
            await w.pass_seconds(10, used, 1.0)
            assert w.actuator.live_count(which) == 1, "activator-1 may have streams there"
            w.scaler.observe(Stats(activator="activator-1", stats=()))
            await w.pass_seconds(5, used, 1.0)
            assert w.actuator.live_count(which) == 0
            assert w.actuator.live_count(used) == 1


async def test_takeover_starts_at_once() -> None:
    """Starts for requests and minimums do not wait."""

    async with running_autoscaler(started_ago_s=0.0) as w:
        which = w.catalogue.add("m", FAST)
        pinned = w.catalogue.add("p", replace_scale(FAST, min=1))
        w.report(which)
        assert w.actuator.live_count(which) == 1
        await w.pass_seconds(3)
        assert w.actuator.live_count(pinned) == 1


async def test_takeover_starts_a_stopped_version_on_request() -> None:
    """The first report of the request went to a control plane that died. The repeated report starts the version."""

    async with running_autoscaler(started_ago_s=0.0) as w:
        which = w.catalogue.add("m", FAST)
        w.catalogue.set_stopped(which, 1)
        await w.clock.advance(0.9)
        w.report(which, 1.0, requests=1)
        assert w.actuator.live_count(which) == 1
