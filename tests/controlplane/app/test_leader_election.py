"""One leads at a time, whoever is cut off, slow, stopped or has a wrong clock; and somebody does, when all is well."""

import asyncio
from contextlib import suppress

import pytest

from controlplane.app.leader_election import LeaderElection
from controlplane.app.leadership_policy import LeaseDurations
from tests.controlplane.app.candidates import NAMES, FakeLeaseStore, LeaseConnection, open_candidates, stand
from tests.controlplane.virtual_time import VirtualClock


async def test_next_leader_takes_over_at_once_after_a_stop() -> None:
    """It gives the Lease up."""
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
    """Whether its renewals come to nothing, or only the answers to them."""
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
        if how == "loses_answers":  # its writes still arrive: it holds the Lease, and can't know it
            it.lines["a"].cut = True
        await it.advance(40)
        assert it.working == ["b"]
        it.lines["a"].cut = it.lines["a"].loses_answers = False
        await it.advance(40)
        assert it.history == ["a", "b"]


async def test_slow_renewal_counts_from_its_start() -> None:
    """Others may have seen it long before its answer comes."""
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
    """Not before, and soon after."""
    async with open_candidates() as it:
        it.start("a")
        await it.advance(5)
        it.start("b")
        await it.advance(5)
        it.lines["a"].cut = True
        await it.stop("a")  # and can't give it up
        waited_s = 0.0
        while not it.working:
            await it.advance(0.5)
            waited_s += 0.5
        assert waited_s <= 18


async def test_finished_work_releases_the_lease() -> None:
    """With what it raised, and the Lease is given up."""

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
    """Stopping takes its time, and another must not begin meanwhile."""
    async with open_candidates() as it:
        clock = it.clock
        election = LeaderElection(it.lines["a"], "kelvin", "leader", "slow", clock, luck=lambda: 0.5)
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
    """A leader that leads on for longer than others wait is found out."""
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
