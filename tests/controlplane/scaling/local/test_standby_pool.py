"""The pool over real sockets and processes: what it learns, when it forks, how it is adopted."""

import pytest

from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.policy.standby_sizing import PoolSizing, SizeReason
from tests.controlplane.builders import key
from tests.controlplane.machine_fixture import LocalMachine, RunDirectory, local
from tests.eventually import eventually

LEARNING = PoolSizing(least=1, maximum=8, target=0.99, share=0.0, budget_bytes=1 << 40)
THREE = tuple(key(name) for name in ("a", "b", "c"))


def found(it: LocalMachine) -> tuple[int, int]:
    """Starts that found a standby, and starts that did not."""
    counts = it.pool.state().counts
    return counts.get(("start", "hit"), 0), counts.get(("start", "miss"), 0)


async def woken(it: LocalMachine, keys: tuple[VersionKey, ...]) -> None:
    """All at once, from zero to ready and back."""
    for each in keys:
        it.apply(each, 1)
    for each in keys:
        await it.ready(each)
    for each in keys:
        it.apply(each, 0)
    await eventually(lambda: it.table.held_slots == 0, "nothing runs")


async def test_pool_grows_after_a_burst(run: RunDirectory) -> None:
    """Three versions wake with one standby parked: two wait for a fork. The next time all three find one."""

    async with local(run, sizing=LEARNING) as it:
        await it.parked(1)
        await woken(it, THREE)
        assert found(it) == (1, 2)
        # On a loaded machine births take seconds, and then the rate alone asks for as many or more.
        await eventually(lambda: it.pool.parked >= 3, "3 parked standbys")
        assert it.pool.state().size.why in (SizeReason.BURSTS, SizeReason.RATE)
        await woken(it, THREE)
        assert found(it) == (4, 2)


async def test_fixed_pool_of_one_always_misses(run: RunDirectory) -> None:
    """The control: a fixed pool, which is what there was before."""

    async with local(run, standbys=1) as it:
        for misses in (2, 4):
            await it.parked(1)
            await woken(it, THREE)
            assert found(it) == (misses // 2, misses)


async def test_spare_core_refills_the_pool_during_a_start(run: RunDirectory) -> None:
    """A restore that lasts keeps nobody from replacing its standby; on two cores the replacement waits at first."""

    async with local(run, cores=3) as it:
        await it.parked()
        it.apply(key("held"), 1)
        await eventually(lambda: len(run.calls("bind:held")) == 1)
        await it.parked()
        run.tell("release")
        await it.ready(key("held"))


async def test_long_restore_does_not_delay_refill(run: RunDirectory) -> None:
    """One that waits for its bytes: the pool is whole again before it ends, on two cores as well."""

    async with local(run) as it:
        await it.parked()
        it.apply(key("held"), 1)
        await it.parked(0)
        await it.parked(1)
        assert it.table.ready(key("held")) == 0
        run.tell("release")
        await it.ready(key("held"))


async def test_adopted_pool_shrinks_slowly(run: RunDirectory) -> None:
    """It does not know why there are three, and lets them be for a while; and it has room for no more than its most."""
    async with local(run, sizing=LEARNING) as it:
        await it.parked(1)
        await woken(it, THREE)
        await it.parked(3)
    born = len(run.calls("born"))
    two = PoolSizing(least=1, maximum=2, target=0.99, share=0.0, budget_bytes=1 << 40)
    for sizing, parked in ((LEARNING, 3), (two, 2)):
        async with local(run, sizing=sizing) as it:
            await it.parked(parked)
            assert len(run.calls("born")) == born


async def test_the_budget_bounds_the_pool_by_what_standbys_take(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was assumed allows four; as soon as real memory is known, it counts, and an operator sees why."""
    monkeypatch.setattr("controlplane.scaling.local.footprints.ASSUMED_BYTES", 1 << 20)
    monkeypatch.setattr("controlplane.scaling.policy.standby_sizing.SHRINK_S", 0.0)

    sizing = PoolSizing(least=4, maximum=4, target=0.99, share=0.0, budget_bytes=4 << 20)
    async with local(run, sizing=sizing) as it:
        await it.parked(4)
        await it.pool.footprints.refresh()
        own = it.pool.footprints.standby_bytes
        assert own > 1 << 20, "a Python process has more"
        await it.parked((4 << 20) // own)
        assert it.pool.state().size.why is SizeReason.BUDGET


async def test_unused_takes_do_not_stay_outstanding(run: RunDirectory) -> None:
    """A standby that comes back unused: the pool is full, and the next take is alone."""

    # At this target the rate of three takes at once asks for no more than one.
    async with local(run, sizing=PoolSizing(least=1, maximum=8, target=0.5, share=0.0, budget_bytes=1 << 40)) as it:
        await it.parked(1)
        for _ in range(3):
            process = it.pool.try_take()
            assert process is not None
            it.pool.put_back(process)
            it.pool.balance()
        assert sum(it.pool.state().takes.outstanding_weights[1:]) == 0.0
        assert it.pool.state().size.why is SizeReason.LEAST
