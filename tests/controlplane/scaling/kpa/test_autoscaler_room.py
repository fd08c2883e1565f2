"""Replicas that the autoscaler ends: an operator stopped the version, or another one needs the slot. And which requests
start it again.
"""

import pytest

from controlplane.scaling.policy.breakeven import Level, LevelChange
from kelvin.contracts.serving.control_messages import Feed, TenantRow
from tests.controlplane.builders import TENANT
from tests.controlplane.scaling.autoscaler_fixture import FAST, replace_scale, running_autoscaler, wake_version


async def test_stop_scales_to_zero_and_next_request_starts() -> None:
    """Running requests may finish and start nothing. A report of a new request starts a replica at once."""
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, min=1))
        await w.pass_seconds(3)
        w.actuator.become_ready(which)
        w.report(which, 3.0, 3)
        w.scaler.stop((which,))
        assert w.actuator.live_count(which) == 0
        w.report(which, 2.7, 2)  # the report of the second in which it was stopped
        assert w.actuator.live_count(which) == 0
        w.actuator.drained(which)
        await w.clock.advance(0.1)
        w.report(which, 1.0, 1)
        assert w.actuator.live_count(which) == 1


async def test_streams_finishing_after_stop_start_nothing() -> None:
    """A minute of reports about streams from before the stop leaves the version at zero."""
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", FAST)
        await wake_version(w, which)
        await w.pass_seconds(5, which, 2.0)
        w.scaler.stop((which,))
        await w.pass_seconds(60, which, 2.0)
        assert w.actuator.live_count(which) == 0
        w.actuator.drained(which)
        w.report(which, 0.4, 0)  # the rest of the last second
        await w.pass_seconds(30)
        assert w.actuator.live_count(which) == 0


async def test_unannounced_request_after_stop_is_served_late() -> None:
    """A report that may be from before the stop starts nothing. The next one does."""
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", FAST)
        await wake_version(w, which)
        w.scaler.stop((which,))
        w.report(which, 0.7, 2)
        assert w.actuator.live_count(which) == 0
        await w.pass_seconds(3, which, 1.0)
        assert w.actuator.live_count(which) == 1


async def test_full_machine_ends_the_longest_idle_version() -> None:
    """Two slots, two idle versions, and a request for a third: the longest-idle replica ends and does not come back."""
    async with running_autoscaler(slots=2) as w:
        first, second, third = (w.catalogue.add(name, replace_scale(FAST, grace_s=600.0)) for name in "abc")
        await wake_version(w, first)
        await w.pass_seconds(2)
        await wake_version(w, second)
        await w.pass_seconds(5)
        requested_us = w.clock.monotonic_us()
        w.report(third)
        await w.pass_seconds(3, third, 1.0)
        assert (w.actuator.live_count(first), w.actuator.live_count(second)) == (0, 1)
        assert w.actuator.live_count(third) == 0, "the slot is held until the process is dead"
        w.actuator.drained(first)
        assert w.actuator.starts[2:] == [(third, requested_us)]
        await w.pass_seconds(20, third, 1.0)
        assert w.actuator.refused == []
        assert w.actuator.live_count(first) == 0


async def test_full_busy_machine_refuses_the_request() -> None:
    """A busy replica is not ended. The request is refused at once."""
    async with running_autoscaler(slots=1) as w:
        busy, other = w.catalogue.add("a", FAST), w.catalogue.add("b", FAST)
        await wake_version(w, busy)
        w.report(other)
        assert w.actuator.refused == [other]
        assert w.actuator.live_count(busy) == 1


@pytest.mark.parametrize("idle", ["zero", "auto"])
async def test_abandoned_slot_wait_is_cancelled(idle: str) -> None:
    """If requests stop before the slot is free, the version gives up its place and starts nothing."""
    async with running_autoscaler(slots=1) as w:
        w.plans.levels = (LevelChange(Level.WARM, 0.0), LevelChange(Level.ASLEEP, 4.0), LevelChange(Level.ZERO, 20.0))
        first = w.catalogue.add("a", FAST)
        second = w.catalogue.add("b", replace_scale(FAST, idle=idle))
        await wake_version(w, first)
        await w.pass_seconds(7)
        w.report(second)
        assert w.actuator.live_count(first) == w.actuator.live_count(second) == 0
        await w.pass_seconds(60)
        w.actuator.drained(first)
        assert [which for which, _ in w.actuator.starts] == [first]
        assert "awaiting_room=0" in repr(w.scaler)


async def test_replicas_without_slot_are_pending() -> None:
    """`pending` counts the replicas that a version lacks, also of a version at zero. It falls when they start or are
    not wanted.
    """
    async with running_autoscaler(slots=1) as w:
        busy, other = w.catalogue.add("m", FAST), w.catalogue.add("n", FAST)
        await wake_version(w, busy)
        assert w.scaler.pending == 0
        w.report(busy, 2.0, 2)
        w.report(other, 1.0, 1)
        w.scaler.check_integrity()
        assert w.scaler.pending == 1
        w.scaler.stop((other,))
        assert w.scaler.pending == 0
        w.report(other, 1.0, 1)
        w.scaler.stop((busy,))
        w.actuator.drained(busy)
        w.scaler.check_integrity()


async def test_deploy_on_a_full_machine_moves_the_slot() -> None:
    """The minimum holds for versions with an alias. The previous version frees its slot once it is idle."""
    async with running_autoscaler(slots=1) as w:
        old = w.catalogue.add("m", replace_scale(FAST, min=1, window_s=60.0, grace_s=30.0))
        await w.pass_seconds(3)
        w.actuator.become_ready(old)
        await w.pass_seconds(2, old, 1.0)
        new = w.catalogue.deploy("m", "b")
        w.scaler.tick()
        await w.pass_seconds(5)
        assert w.actuator.live_count(old) == 0, "it drains seconds after its last request"
        w.actuator.drained(old)
        assert w.actuator.live_count(new) == 1


async def test_making_room_takes_one_replica_and_keeps_the_minimum() -> None:
    """Of two idle replicas with a minimum of 1 one ends, and the other is never taken."""
    async with running_autoscaler(slots=2) as w:
        pinned = w.catalogue.add("m", replace_scale(FAST, min=1, max=2))
        other, third = w.catalogue.add("n", FAST), w.catalogue.add("o", FAST)
        w.actuator.serving[pinned] = 2
        await w.pass_seconds(5)
        w.report(other)
        assert w.actuator.live_count(pinned) == 1
        w.actuator.drained(pinned)
        assert w.actuator.live_count(other) == 1
        w.actuator.become_ready(other)
        for _ in range(10):
            w.report(third)
            await w.pass_seconds(1, other, 1.0)
        assert w.actuator.live_count(pinned) == 1, "never under its minimum"


async def test_minimum_makes_room_for_each_of_its_replicas() -> None:
    """The minimum is raised to three on a full machine. Two idle replicas without a minimum end, one after the other.
    Busy replicas and those of another minimum stay.
    """
    async with running_autoscaler(slots=5) as w:
        promised = w.catalogue.add("m", replace_scale(FAST, max=3))
        kept = w.catalogue.add("k", replace_scale(FAST, min=1, max=2))
        idle, busy = w.catalogue.add("i", replace_scale(FAST, max=2)), w.catalogue.add("b", FAST)
        w.actuator.serving.update({promised: 1, kept: 1, idle: 2, busy: 1})
        await w.pass_seconds(3, busy, 1.0)
        w.catalogue.set_scale(promised, replace_scale(FAST, min=3, max=3))
        for replicas in (1, 0):
            await w.pass_seconds(2, busy, 1.0)
            assert (w.actuator.live_count(idle), w.actuator.draining[idle]) == (replicas, 1)
            w.actuator.drained(idle)
        assert w.actuator.live_count(promised) == 3
        await w.pass_seconds(4, busy, 1.0)
        assert [w.actuator.live_count(each) for each in (promised, kept, busy)] == [3, 1, 1]


async def test_two_minimums_without_room_take_no_slot() -> None:
    """Three slots for minimums of two and two: the replicas stay as they are, and nothing starts."""
    async with running_autoscaler(slots=3) as w:
        scale = replace_scale(FAST, min=2, max=2)
        first, second = w.catalogue.add("m", scale), w.catalogue.add("n", scale)
        w.actuator.serving.update({first: 2, second: 1})
        await w.pass_seconds(60)
        assert (w.actuator.ready_count(first), w.actuator.ready_count(second)) == (2, 1)
        assert w.actuator.starts == []
        assert w.scaler.pending == 1


async def test_victim_of_a_minimum_does_not_retake_its_slot() -> None:
    """The model that lost its replica gets requests again. It waits, and the minimum keeps its replicas."""
    async with running_autoscaler(slots=2) as w:
        promised, other = w.catalogue.add("m", replace_scale(FAST, min=2, max=2)), w.catalogue.add("n", FAST)
        w.actuator.serving.update({promised: 1, other: 1})
        await w.pass_seconds(4)
        w.actuator.drained(other)
        w.actuator.become_ready(promised)
        for _ in range(20):
            w.report(other)
            await w.pass_seconds(1)
        assert (w.actuator.live_count(promised), w.actuator.live_count(other)) == (2, 0)


async def test_stop_survives_a_restart_until_the_next_request() -> None:
    """A new control plane does not start the minimum of a stopped version. A request ends the stop."""
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, min=2, max=2))
        w.catalogue.set_stopped(which, 1)
        await w.pass_seconds(60)
        assert w.actuator.starts == []
        w.report(which)
        assert w.actuator.live_count(which) == 1
        await w.pass_seconds(3, which, 1.0)
        assert w.actuator.live_count(which) == 2, "the minimum holds again"


async def test_streams_after_a_restart_do_not_end_a_stop() -> None:
    """Reports about streams from before the stop are not requests."""
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, min=1))
        w.catalogue.set_stopped(which, 1)
        w.actuator.draining[which] = 1
        for _ in range(20):
            w.report(which, 1.0, 0)
            await w.clock.advance(1.0)
        assert w.actuator.starts == []
        found = w.catalogue.find(which)
        assert found is not None
        assert found[1].stopped_at_s == 1


async def test_nothing_runs_for_a_suspended_tenant() -> None:
    """Neither a minimum nor a request starts a replica, also after a restart. Running replicas end."""
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, min=1))
        w.feed.publish(Feed(tenants=(TenantRow(tenant=TENANT, suspended=True),)))
        w.actuator.serving[which] = 1  # adopted
        w.report(which)
        await w.pass_seconds(3, which, 1.0)
        assert w.actuator.live_count(which) == 0
        w.actuator.drained(which)
        await w.pass_seconds(40, which, 1.0)
        assert w.actuator.starts == []
        w.feed.publish(Feed(tenants=(TenantRow(tenant=TENANT, suspended=False),)))
        await w.pass_seconds(3)
        assert w.actuator.live_count(which) == 1, "resumed: its minimum holds"


async def test_replicas_beyond_the_slots_wait_for_room() -> None:
    """The wait has no limit, and a freed slot is used within a tick. `test_slots_are_never_exceeded` in
    test_local_actuator.py checks that a wait is no failed start.
    """
    async with running_autoscaler(slots=2) as w:
        which = w.catalogue.add("m", replace_scale(FAST, min=3, max=3))
        busy = w.catalogue.add("b", FAST)
        await wake_version(w, busy)
        await w.pass_seconds(3, busy, 1.0)
        w.actuator.become_ready(which)
        await w.pass_seconds(60, busy, 1.0)
        assert (w.actuator.live_count(which), w.scaler.pending) == (1, 2)
        w.actuator.die(busy)
        w.scaler.stop((busy,))
        await w.pass_seconds(3)
        assert w.actuator.live_count(which) == 2
