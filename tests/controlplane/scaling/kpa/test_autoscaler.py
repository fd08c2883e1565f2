"""Autoscaler on virtual time, with a fake actuator: wake, scale out, go idle, fail, recover."""

import pytest

from controlplane.registry.policy.domain import VersionKey
from kelvin.contracts.serving.control_messages import Stats
from tests.controlplane.builders import key, stats
from tests.controlplane.scaling.autoscaler_fixture import FAST, replace_scale, running_autoscaler, wake_version


async def test_request_at_zero_starts_a_replica_at_once() -> None:
    """The start happens while the report is handled, and its spans count from that time."""

    async with running_autoscaler() as w:
        which = w.catalogue.add("m", FAST)
        now_us = w.clock.monotonic_us()
        w.report(which)
        assert w.actuator.starts == [(which, now_us)]


@pytest.mark.parametrize("concurrency", [1.0, 40.0])
async def test_thousand_requests_at_zero_make_one_start(concurrency: float) -> None:
    """With a maximum of 1 no request starts a second replica, however long the start takes."""

    async with running_autoscaler() as w:
        which = w.catalogue.add("m", FAST)
        for _ in range(1000):
            w.report(which, concurrency)
        await w.pass_seconds(30, which, 200.0)
        assert len(w.actuator.starts) == 1


async def test_uncounted_starts_make_many_replicas() -> None:
    """Negative control: if starting replicas are not counted, every request starts one."""

    async with running_autoscaler(slots=10_000) as w:
        which = w.catalogue.add("m", FAST)
        w.actuator.live_count = lambda which: 0  # type: ignore[method-assign]
        for _ in range(1000):
            w.report(which)
        assert len(w.actuator.starts) > 900


async def test_load_scales_out_up_to_the_maximum() -> None:
    """With 10 streams per replica at 70 %, 35 streams need five replicas. A maximum of 3 gives three."""

    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, max=8), max_streams=10)
        capped = w.catalogue.add("n", replace_scale(FAST, max=3), max_streams=10)
        for each in (which, capped):
            await wake_version(w, each)
        for _ in range(6):
            w.report(which, 35.0, 0)
            w.report(capped, 35.0, 0)
            await w.clock.advance(1.0)
        assert w.actuator.live_count(which) == 5
        assert w.actuator.live_count(capped) == 3


async def test_idle_version_scales_to_zero_after_window_and_grace() -> None:
    """The stable window and then the grace must pass without a request. One request in between keeps the replica."""

    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, window_s=6.0, grace_s=10.0))
        await wake_version(w, which)
        await w.pass_seconds(5, which, 1.0)
        await w.pass_seconds(12)
        assert w.actuator.ready_count(which) == 1, "window over, grace not"
        w.report(which)
        await w.pass_seconds(14)
        assert w.actuator.ready_count(which) == 1, "the request restarted the window"
        await w.pass_seconds(16)
        assert w.actuator.live_count(which) == 0
        assert len(w.actuator.starts) == 1


async def test_version_under_load_keeps_its_replica() -> None:
    """Ten minutes of steady load keep exactly one replica."""

    async with running_autoscaler() as w:
        which = w.catalogue.add("m", FAST)
        await wake_version(w, which)
        for _ in range(600):
            await w.pass_seconds(1, which, 1.0)
            assert w.actuator.live_count(which) == 1


async def test_start_continues_after_its_caller_leaves() -> None:
    """The start is not cancelled. Its replica scales to zero later because it is idle."""

    async with running_autoscaler() as w:
        which = w.catalogue.add("m", FAST)
        w.report(which)
        await w.pass_seconds(60)
        assert w.actuator.live_count(which) == 1
        w.actuator.become_ready(which)
        await w.pass_seconds(12)
        assert w.actuator.live_count(which) == 0


async def test_failed_start_is_retried_on_request_after_a_second() -> None:
    """Ticks never retry. A request within the second is remembered and starts a replica when the second is over."""

    async with running_autoscaler() as w:
        which = w.catalogue.add("m", FAST)
        w.report(which)
        w.actuator.fail(which)
        await w.pass_seconds(30)
        assert len(w.actuator.starts) == 1, "no request came"
        w.report(which)
        assert len(w.actuator.starts) == 2
        w.actuator.fail(which)
        await w.clock.advance(0.3)
        requested_us = w.clock.monotonic_us()
        for _ in range(100):
            w.report(which)
        assert len(w.actuator.starts) == 2, "too soon"
        await w.clock.advance(0.69)
        assert len(w.actuator.starts) == 2
        await w.clock.advance(0.02)
        assert w.actuator.starts[2:] == [(which, requested_us)]


async def test_minimum_is_kept_and_retried() -> None:
    """The minimum is kept without traffic, also after replicas die or fail to start."""

    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, min=2, max=2))
        await w.pass_seconds(3)
        assert w.actuator.live_count(which) == 2
        w.actuator.become_ready(which)
        w.actuator.become_ready(which)
        await w.pass_seconds(120)
        assert w.actuator.ready_count(which) == 2
        w.actuator.die(which)
        assert w.actuator.live_count(which) == 2, "made up for at once"
        w.actuator.become_ready(which)
        w.actuator.die(which)
        w.actuator.die(which)
        w.actuator.fail(which) if w.actuator.starting.get(which) else None
        await w.pass_seconds(40)
        assert w.actuator.live_count(which) == 2


async def test_repeated_exits_are_replaced_once_a_second() -> None:
    """A version whose replicas die at once is restarted at most about once per second."""

    async with running_autoscaler() as w:
        which = w.catalogue.add("m", FAST)
        await wake_version(w, which)
        began = len(w.actuator.starts)
        w.report(which)
        w.actuator.die(which)
        for _ in range(100):
            w.report(which, 1.0, 0)
            if w.actuator.starting.get(which):
                w.actuator.become_ready(which)
                w.actuator.die(which)
            await w.clock.advance(0.1)
        assert 8 <= len(w.actuator.starts) - began <= 13


async def test_unused_versions_cost_nothing() -> None:
    """Of 10,000 models at zero the autoscaler keeps no state. A version that scales to zero is forgotten."""

    async with running_autoscaler() as w:
        for number in range(10_000):
            w.catalogue.add(f"m{number}", FAST)
        which = key("m7")
        await wake_version(w, which)
        await w.pass_seconds(30)
        assert w.actuator.live_count(which) == 0
        w.actuator.drained(which)
        await w.pass_seconds(10)
        assert len(w.scaler._scalers) == 0


async def test_an_unknown_version_is_ignored() -> None:
    """A report about an unknown version starts nothing and leaves no state."""

    async with running_autoscaler() as w:
        w.report(key("unknown"))
        assert w.actuator.starts == []
        assert len(w.scaler._scalers) == 0


async def test_adopted_replicas_stay_for_a_stable_window() -> None:
    """A restarted autoscaler has no metrics. Replicas stay for the window, then idle ones leave."""

    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, max=4))
        w.actuator.serving[which] = 3
        await w.pass_seconds(5)
        assert w.actuator.ready_count(which) == 3
        await w.pass_seconds(40)
        assert w.actuator.ready_count(which) == 0


async def test_a_defect_in_one_version_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """The loop continues and logs the error."""

    async with running_autoscaler() as w:
        bad, good = w.catalogue.add("a", replace_scale(FAST, min=1)), w.catalogue.add("b", FAST)
        apply = w.actuator.apply

        def broken(which: VersionKey, replicas: int, requested_us: int) -> None:
            if which == bad:
                raise RuntimeError("defect")
            apply(which, replicas, requested_us)

        w.actuator.apply = broken  # type: ignore[method-assign]
        await wake_version(w, good)
        await w.pass_seconds(12)
        assert w.actuator.live_count(good) == 0
    assert "one part of the work failed; the others go on" in caplog.text


async def test_report_of_a_defective_version_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Later versions of the same report start, and so do versions that wait for a device slot."""

    async with running_autoscaler(slots=1) as w:
        bad, good = w.catalogue.add("a", FAST), w.catalogue.add("b", FAST)
        apply = w.actuator.apply

        def broken(which: VersionKey, replicas: int, requested_us: int) -> None:
            if which == bad:
                raise RuntimeError("defect")
            apply(which, replicas, requested_us)

        w.actuator.apply = broken  # type: ignore[method-assign]
        both = (*stats(bad).stats, *stats(good).stats)
        w.scaler.observe(Stats(activator="activator-0", stats=both))
        assert [which for which, _ in w.actuator.starts] == [good]
        w.scaler.stop((bad, good))
        assert w.actuator.live_count(good) == 0
    assert "defect" in caplog.text
