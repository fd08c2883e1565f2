"""At most one candidate leads, even if one is cut off, slow or stopped. A healthy group has a leader."""

import asyncio
from contextlib import suppress

import pytest

from controlplane.app.leader_election import LeaderElection
from controlplane.app.leadership_policy import LeaseDurations
from tests.controlplane.app.candidates import NAMES, FakeLeaseStore, LeaseConnection, open_candidates, stand
from tests.controlplane.virtual_time import VirtualClock


async def test_next_leader_takes_over_at_once_after_a_stop() -> None:
    """A leader that stops releases the Lease."""
    async with open_candidates() as it:
        for name in NAMES:
            it.start(name)
            await it.advance(1)
        await it.advance(60)
        assert it.history == ["a"]
        assert [each.holder for each in it.elections.values()] == ["a-0"] * 3
        await it.stop("a")
        await it.advance(3)
        assert len(it.history) == 2
        (lease,) = it.store.kept.values()
        assert lease["spec"]["leaseTransitions"] == 1


@pytest.mark.parametrize("how", ["cut", "loses_answers"])
async def test_leader_that_cannot_renew_stops_first(how: str) -> None:
    """This holds if its renewals are lost, and if only the answers to them are lost."""
    async with open_candidates() as it:
        it.start("a")
        await it.advance(5)
        it.start("b")
        await it.advance(5)
        setattr(it.lines["a"], how, True)
        stopped_after_s = 0.0
        while it.working == ["a"]:
            await it.advance(0.5)
            stopped_after_s += 0.5
        assert it.working == []
        assert 7 <= stopped_after_s <= 12.5
        if how == "loses_answers":  # its writes still arrive: it holds the Lease without knowing
            it.lines["a"].cut = True
        await it.advance(40)
        assert it.working == ["b"]
        it.lines["a"].cut = it.lines["a"].loses_answers = False
        await it.advance(40)
        assert it.history == ["a", "b"]


async def test_slow_renewal_counts_from_its_start() -> None:
    """Other candidates may see the renewal long before its answer arrives."""
    async with open_candidates() as it:
        it.lines["a"].delay_s = 3.0
        it.start("a")
        while not it.working:
            await it.advance(0.5)
        assert 5.5 <= it.clock.monotonic_us() / 1e6 - 1000.0 <= 6.5
        it.lines["a"].cut = True
        await it.advance(4.5)
        assert it.working == []


async def test_killed_leader_is_replaced_after_lease_expiry() -> None:
    """A new leader works at most 18 s after the old one was killed."""
    async with open_candidates() as it:
        it.start("a")
        await it.advance(5)
        it.start("b")
        await it.advance(5)
        it.lines["a"].cut = True
        await it.stop("a")  # it cannot release the Lease
        waited_s = 0.0
        while not it.working:
            await it.advance(0.5)
            waited_s += 0.5
        assert waited_s <= 18


async def test_finished_work_releases_the_lease() -> None:
    """The error of the work is raised, too."""
    store, clock = FakeLeaseStore(), VirtualClock()
    election = LeaderElection(LeaseConnection(store, clock), "kelvin", "leader", "a", clock)

    async def work() -> None:
        assert election.leading
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await stand(election, work)
    (lease,) = store.kept.values()
    assert lease["spec"]["holderIdentity"] == ""
    assert not election.leading


async def test_lease_is_kept_while_work_stops() -> None:
    """No other candidate may start while the old leader's work is still stopping."""
    async with open_candidates() as it:
        clock = it.clock
        election = LeaderElection(it.lines["a"], "kelvin", "leader", "slow", clock, jitter=lambda: 0.5)
        stopped: list[float] = []

        async def work() -> None:
            it.working.append("slow")
            try:
                await asyncio.Event().wait()
            finally:
                await clock.sleep(60)
                it.working.remove("slow")
                stopped.append(clock.monotonic_us())

        task = asyncio.create_task(stand(election, work))
        await it.advance(2)
        it.start("b")
        await it.advance(2)
        task.cancel()
        await it.advance(59)
        assert it.working == ["slow"]
        await it.advance(10)
        assert stopped
        assert it.working == ["b"]
        with suppress(asyncio.CancelledError):
            await task


async def test_two_leaders_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a leader that holds on longer than the others wait makes two leaders. The check fails."""
    broken = LeaseDurations()
    object.__setattr__(broken, "hold_s", 60.0)
    async with open_candidates() as it:
        monkeypatch.setattr("controlplane.app.leader_election.LeaseDurations", lambda: broken)
        it.start("a")
        await it.advance(5)
        it.start("b")
        await it.advance(5)
        it.lines["a"].cut = True
        with pytest.raises(AssertionError):
            await it.advance(40)
        it.lines["a"].cut = False
        it.tasks = {name: task for name, task in it.tasks.items() if not task.done()}
