"""StandbyPool on real sockets and processes: how it learns its size, when it forks, how it is adopted."""

import pytest

from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.policy.standby_sizing import PoolSizing, SizeReason
from tests.controlplane.builders import key
from tests.controlplane.machine_fixture import LocalMachine, RunDirectory, local
from tests.eventually import eventually

LEARNING = PoolSizing(minimum=1, maximum=8, target=0.99, share=0.0, budget_bytes=1 << 40)
THREE = tuple(key(name) for name in ("a", "b", "c"))


def hits_and_misses(it: LocalMachine) -> tuple[int, int]:
    """Return the number of starts that found a standby and of those that did not."""
    counts = it.pool.state().counts
    return counts.get(("start", "hit"), 0), counts.get(("start", "miss"), 0)


async def start_and_stop(it: LocalMachine, keys: tuple[VersionKey, ...]) -> None:
    """Start all versions at once, wait until they are ready, and scale them to zero."""
    for each in keys:
        it.apply(each, 1)
    for each in keys:
        await it.wait_until_ready(each)
    for each in keys:
        it.apply(each, 0)
    await eventually(lambda: it.table.held_slots == 0, "nothing runs")


async def test_pool_grows_after_a_burst(run: RunDirectory) -> None:
    """Three versions start with one standby parked: two wait for a fork. Next time all three find one."""
    async with local(run, sizing=LEARNING) as it:
        await it.wait_until_parked(1)
        await start_and_stop(it, THREE)
        assert hits_and_misses(it) == (1, 2)
        # On a loaded machine births take seconds, and then the rate alone asks for as many or more.
        await eventually(lambda: it.pool.parked >= 3, "3 parked standbys")
        assert it.pool.state().size.reason in (SizeReason.BURSTS, SizeReason.RATE)
        await start_and_stop(it, THREE)
        assert hits_and_misses(it) == (4, 2)


async def test_fixed_pool_of_one_always_misses(run: RunDirectory) -> None:
    """Control: a fixed pool does not learn."""
    async with local(run, standbys=1) as it:
        for misses in (2, 4):
            await it.wait_until_parked(1)
            await start_and_stop(it, THREE)
            assert hits_and_misses(it) == (misses // 2, misses)


async def test_spare_core_refills_the_pool_during_a_start(run: RunDirectory) -> None:
    """With three cores the standby is replaced during the restore. With two cores the replacement waits at first."""
    async with local(run, cores=3) as it:
        await it.wait_until_parked()
        it.apply(key("held"), 1)
        await eventually(lambda: len(run.calls("bind:held")) == 1)
        await it.wait_until_parked()
        run.tell("release")
        await it.wait_until_ready(key("held"))


async def test_long_restore_does_not_delay_refill(run: RunDirectory) -> None:
    """The restore waits for its bytes. The pool is full again before it ends, also on two cores."""
    async with local(run) as it:
        await it.wait_until_parked()
        it.apply(key("held"), 1)
        await it.wait_until_parked(0)
        await it.wait_until_parked(1)
        assert it.table.ready_count(key("held")) == 0
        run.tell("release")
        await it.wait_until_ready(key("held"))


async def test_adopted_pool_shrinks_slowly(run: RunDirectory) -> None:
    """The next control plane keeps three standbys for a while, because it does not know why there are three. Its
    maximum still holds.
    """
    async with local(run, sizing=LEARNING) as it:
        await it.wait_until_parked(1)
        await start_and_stop(it, THREE)
        await it.wait_until_parked(3)
    born = len(run.calls("born"))
    two = PoolSizing(minimum=1, maximum=2, target=0.99, share=0.0, budget_bytes=1 << 40)
    for sizing, parked in ((LEARNING, 3), (two, 2)):
        async with local(run, sizing=sizing) as it:
            await it.wait_until_parked(parked)
            assert len(run.calls("born")) == born


async def test_the_budget_bounds_the_pool_by_what_standbys_take(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assumed size allows four. The measured size allows fewer, and the state names the budget as the reason."""
    monkeypatch.setattr("controlplane.scaling.local.footprints.ASSUMED_BYTES", 1 << 20)
    monkeypatch.setattr("controlplane.scaling.policy.standby_sizing.SHRINK_S", 0.0)

    sizing = PoolSizing(minimum=4, maximum=4, target=0.99, share=0.0, budget_bytes=4 << 20)
    async with local(run, sizing=sizing) as it:
        await it.wait_until_parked(4)
        await it.pool.footprints.refresh()
        own = it.pool.footprints.standby_bytes
        assert own > 1 << 20, "a Python process takes more"
        await it.wait_until_parked((4 << 20) // own)
        assert it.pool.state().size.reason is SizeReason.BUDGET


async def test_unused_takes_do_not_stay_outstanding(run: RunDirectory) -> None:
    """A standby that is put back unused leaves no outstanding take."""

    # At this target the rate of three takes at once asks for no more than one.
    async with local(run, sizing=PoolSizing(minimum=1, maximum=8, target=0.5, share=0.0, budget_bytes=1 << 40)) as it:
        await it.wait_until_parked(1)
        for _ in range(3):
            process = it.pool.try_take()
            assert process is not None
            it.pool.put_back(process)
            it.pool.balance()
        assert sum(it.pool.state().takes.outstanding_weights[1:]) == 0.0
        assert it.pool.state().size.reason is SizeReason.LEAST
