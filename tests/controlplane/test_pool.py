"""The pool over real sockets and processes: what it learns, when it forks, how it is adopted."""

import pytest

from controlplane.facts import VersionKey
from controlplane.policy.standbys import Sizing, Why
from tests.controlplane.builders import key
from tests.controlplane.ground import Local, Run, local
from tests.eventually import eventually

LEARNING = Sizing(least=1, most=8, target=0.99, share=0.0, budget_bytes=1 << 40)
THREE = tuple(key(name) for name in ("a", "b", "c"))


def found(it: Local) -> tuple[int, int]:
    """Starts that found a standby, and starts that did not."""
    counts = it.pool.state().counts
    return counts.get(("start", "hit"), 0), counts.get(("start", "miss"), 0)


async def woken(it: Local, keys: tuple[VersionKey, ...]) -> None:
    """All at once, from zero to ready and back."""
    for each in keys:
        it.apply(each, 1)
    for each in keys:
        await it.ready(each)
    for each in keys:
        it.apply(each, 0)
    await eventually(lambda: it.table.held == 0, "nothing runs")


async def test_what_came_at_once_is_kept_for_the_next_time(run: Run) -> None:
    """Three versions wake with one standby parked: two wait for a fork. The next time all three find one."""

    async with local(run, sizing=LEARNING) as it:
        await it.parked(1)
        await woken(it, THREE)
        assert found(it) == (1, 2)
        # On a loaded machine births take seconds, and then the rate alone asks for as many or more.
        await eventually(lambda: it.pool.parked >= 3, "3 parked standbys")
        assert it.pool.state().size.why in (Why.BURSTS, Why.RATE)
        await woken(it, THREE)
        assert found(it) == (4, 2)


async def test_a_pool_of_one_misses_every_time(run: Run) -> None:
    """The control: a fixed pool, which is what there was before."""

    async with local(run, standbys=1) as it:
        for misses in (2, 4):
            await it.parked(1)
            await woken(it, THREE)
            assert found(it) == (misses // 2, misses)


async def test_a_third_core_replaces_while_a_start_has_two(run: Run) -> None:
    """A restore that lasts keeps nobody from replacing its standby; on two cores the replacement waits at first."""

    async with local(run, cores=3) as it:
        await it.parked()
        it.apply(key("held"), 1)
        await eventually(lambda: len(run.calls("bind:held")) == 1)
        await it.parked()
        run.tell("release")
        await it.ready(key("held"))


async def test_a_restore_that_lasts_gives_way(run: Run) -> None:
    """One that waits for its bytes: the pool is whole again before it ends, on two cores as well."""

    async with local(run) as it:
        await it.parked()
        it.apply(key("held"), 1)
        await it.parked(0)
        await it.parked(1)
        assert it.table.ready(key("held")) == 0
        run.tell("release")
        await it.ready(key("held"))


async def test_the_next_control_plane_keeps_the_pool(run: Run) -> None:
    """It does not know why there are three, and lets them be for a while; and it has room for no more than its most."""
    async with local(run, sizing=LEARNING) as it:
        await it.parked(1)
        await woken(it, THREE)
        await it.parked(3)
    born = len(run.calls("born"))
    two = Sizing(least=1, most=2, target=0.99, share=0.0, budget_bytes=1 << 40)
    for sizing, parked in ((LEARNING, 3), (two, 2)):
        async with local(run, sizing=sizing) as it:
            await it.parked(parked)
            assert len(run.calls("born")) == born


async def test_the_budget_bounds_the_pool_by_what_standbys_take(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was assumed allows four; as soon as real memory is known, it counts, and an operator sees why."""
    monkeypatch.setattr("controlplane.scaling.footprints.ASSUMED_BYTES", 1 << 20)
    monkeypatch.setattr("controlplane.policy.standbys.SHRINK_S", 0.0)

    sizing = Sizing(least=4, most=4, target=0.99, share=0.0, budget_bytes=4 << 20)
    async with local(run, sizing=sizing) as it:
        await it.parked(4)
        await it.pool.footprints.refresh()
        own = it.pool.footprints.standby_bytes
        assert own > 1 << 20, "a Python process has more"
        await it.parked((4 << 20) // own)
        assert it.pool.state().size.why is Why.BUDGET


async def test_takes_that_come_to_nothing_are_not_outstanding_for_ever(run: Run) -> None:
    """A standby that comes back unused: the pool is full, and the next take is alone."""

    # At this target the rate of three takes at once asks for no more than one.
    async with local(run, sizing=Sizing(least=1, most=8, target=0.5, share=0.0, budget_bytes=1 << 40)) as it:
        await it.parked(1)
        for _ in range(3):
            process = it.pool.try_take()
            assert process is not None
            it.pool.put_back(process)
            it.pool.balance()
        assert sum(it.pool.state().takes.together[1:]) == 0.0
        assert it.pool.state().size.why is Why.LEAST
