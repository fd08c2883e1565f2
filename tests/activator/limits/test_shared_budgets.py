"""A month's budget, of one activator and of several over one real Redis: the same claims, and what holds together."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack

import pytest

from activator.limits.policy.held_quota import BUDGETS
from kelvin.contracts.accounting.spending import SpendingRow
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.traffic_errors import BudgetSpent, BudgetUnavailable
from tests.activator.limits.spending import END_US, TENANT, BudgetActivator, Ledger, alone, door, over_redis
from tests.activator.redis_server import RedisServer, wait_until_up

BUDGET = 1000
PARTS, QUIET_S = BUDGETS.parts, BUDGETS.quiet_s
KEY = f"kelvin:{{{TENANT}}}:budget:2026-11"

EACH = pytest.mark.parametrize("opened", [alone, over_redis])
Opened = Callable[[], AbstractAsyncContextManager[BudgetActivator]]


@EACH
async def test_shared_budget_is_spent_up_to_its_limit(opened: Opened) -> None:
    """At the most that requests may cost while they run, at what they did cost once they ended; also what the ledger
    has, once, and a budget that was raised.
    """
    async with opened() as here:
        ledger = Ledger(spent=100)
        here.tell(ledger.row())
        assert await here.try_hold(BUDGET, 600) is None
        assert await here.try_hold(BUDGET, 301) == BudgetSpent(BUDGET, 301)
        assert await here.try_hold(BUDGET, 300) is None
        here.clock.now_s += QUIET_S
        assert await here.try_hold(BUDGET, 0) == BudgetSpent(BUDGET), "nothing is left, not even for what is free"
        here.end(0, 50)
        assert await here.try_hold(BUDGET, 550) is None
        here.end(-1, 0)
        here.ship(ledger)
        here.tell(ledger.row())
        await here.tend()
        here.clock.now_s += QUIET_S
        assert await here.try_hold(BUDGET, 551) == BudgetSpent(BUDGET, 551)
        assert await here.try_hold(BUDGET, 550) is None
        here.clock.now_s += QUIET_S
        assert await here.try_hold(BUDGET + 5, 5) is None


@EACH
async def test_requests_are_free_before_the_first_ledger_row(opened: Opened) -> None:
    """Nothing costs anything; a budget of nothing lets nobody in all the same."""
    async with opened() as here:
        assert await here.use(1, 600, 0) is None
        assert await here.use(0, 600, 0) == BudgetSpent(0)


@EACH
async def test_leases_restart_in_a_new_month(opened: Opened) -> None:
    """It begins with what is under way; of what was leased and spent nothing is left."""
    async with opened() as here:
        here.tell(Ledger(spent=900).row())
        assert await here.try_hold(BUDGET, 100) is None
        assert await here.try_hold(BUDGET, 1) == BudgetSpent(BUDGET, 1)
        here.wall.now_s = END_US / 1e6
        here.clock.now_s += QUIET_S
        assert await here.try_hold(BUDGET, 900) is None
        assert await here.try_hold(BUDGET, 1) == BudgetSpent(BUDGET, 1)
        here.tell(Ledger("2026-12", 2 * END_US).row())
        here.clock.now_s += QUIET_S
        assert await here.try_hold(BUDGET, 1) == BudgetSpent(BUDGET, 1)
        here.end(0, 0)
        assert await here.try_hold(BUDGET, 100) is None


@EACH
async def test_concurrent_requests_get_covered_units_only(opened: Opened) -> None:
    """Ten at once of which five are covered; nothing is held for who gave up while it waited."""
    async with opened() as here:
        here.tell(Ledger().row())
        told = await asyncio.gather(*(here.try_hold(BUDGET, 200) for _ in range(10)))
        assert told == [None] * 5 + [BudgetSpent(BUDGET, 200)] * 5
        while here.held:
            here.end(0, 0)
        leaving = asyncio.ensure_future(here.try_hold(2 * BUDGET, 2000))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait((leaving,))
        while here.held:
            here.end(0, 0)
        here.clock.now_s += QUIET_S
        assert await here.try_hold(2 * BUDGET, 2000) is None


@pytest.mark.parametrize("shared", [pytest.param(True, id="one Redis"), pytest.param(False, id="three: the control")])
def test_several_never_pass_the_budget(shared: bool) -> None:
    """Requests begin, end, are shipped, and the ledger's word comes late and to each at another time: what it has, what
    it lacks and what is under way is never more than the budget. When all is told, all of it can be spent.
    """

    async def scenario(servers: list[RedisServer], draw: random.Random) -> None:
        ledger = Ledger()
        rows: list[SpendingRow] = [ledger.row()]
        most_committed = 0
        async with asyncio.timeout(120), AsyncExitStack() as stack:
            doors = [
                await stack.enter_async_context(door(server, f"{draw.random()}"))
                for server in (servers if shared else servers[1:] + servers[:1])
            ]
            heard = [0] * len(doors)
            for each in doors:
                each.tell(rows[0])  # before it nothing costs anything
            for _ in range(400):
                at = draw.randrange(len(doors))
                one = doors[at]
                match draw.randrange(6):
                    case 0 | 1:
                        one.clock.now_s += draw.choice((0.0, QUIET_S))
                        await one.try_hold(BUDGET, draw.randrange(60))
                    case 2:
                        await asyncio.gather(*(each.try_hold(BUDGET, draw.randrange(30)) for each in doors))
                    case 3 if one.held:
                        which = draw.randrange(len(one.held))
                        one.end(which, draw.randrange(one.held[which][1] // 4 + 1))
                    case 4:
                        one.ship(ledger)
                        rows.append(ledger.row())
                    case 5:
                        heard[at] = draw.randrange(heard[at], len(rows))
                        one.tell(rows[heard[at]])
                        if draw.randrange(2):
                            await one.tend()
                    case _:
                        pass
                most_committed = max(most_committed, ledger.spent + sum(each.committed for each in doors))
            assert (most_committed <= BUDGET) == shared, most_committed
            for each in doors:
                while each.held:
                    each.end(0, 0)
                each.ship(ledger)
            for _ in range(3):  # with the first renewal what was used lately stays
                for each in doors:
                    each.tell(ledger.row())
                    await each.tend()
            doors[0].clock.now_s += QUIET_S
            if shared and ledger.spent < BUDGET:
                assert await doors[0].try_hold(BUDGET, BUDGET - ledger.spent) is None

    with ExitStack() as stack:
        servers = [stack.enter_context(RedisServer()) for _ in range(1 if shared else 3)] * (3 if shared else 1)
        for seed in range(5):
            for server in servers:
                server.ask("FLUSHALL")
            asyncio.run(scenario(servers, random.Random(seed)))


@pytest.mark.parametrize("early", [False, True])
async def test_what_the_ledger_took_over_is_leased_no_more(early: bool, redis: RedisServer) -> None:
    """Whether it tells so before the record is known to be durable, or after: what is left is not lent twice."""
    async with asyncio.timeout(60), door(redis) as here, door(redis, "two") as other:
        ledger = Ledger()
        for each in (here, other):
            each.tell(ledger.row())
        assert await here.try_hold(BUDGET, 300) is None
        assert await other.try_hold(BUDGET, 690) is None
        if early:
            here.tell(Ledger(spent=300, seen={"one": 1}).row())
            here.end(0, 300)
        else:
            here.end(0, 300)
            here.ship(ledger)
            here.tell(ledger.row())
        assert await here.try_hold(BUDGET, 300) == BudgetSpent(BUDGET, 300)
        assert await here.try_hold(BUDGET, 10) is None


async def test_what_is_used_during_a_question_stays_leased(redis: RedisServer) -> None:
    """Two knows already that the ledger has what one's lease was for, so the store has nothing left when it asks for
    more. What it uses of its own lease until the answer comes is nobody else's.
    """
    async with asyncio.timeout(60), door(redis) as one, door(redis, "two") as two:
        ledger, budget = Ledger(), 100
        one.tell(ledger.row())
        two.tell(ledger.row())
        assert await one.use(budget, 50, 50) is None
        assert await two.use(budget, 40, 0) is None
        one.ship(ledger)
        two.tell(ledger.row())
        more, covered = await asyncio.gather(two.try_hold(budget, 45), two.try_hold(budget, 40))
        assert (more, covered) == (BudgetSpent(budget, 45), None)
        one.tell(ledger.row())
        assert await one.try_hold(budget, 50) == BudgetSpent(budget, 50)
        assert ledger.spent + one.committed + two.committed <= budget


async def test_records_of_a_removed_tenant_hold_no_lease(redis: RedisServer) -> None:
    """The ledger has them, and the tenant comes back: what they cost is charged once."""
    async with asyncio.timeout(60), door(redis) as one:
        ledger = Ledger()
        one.tell(ledger.row())
        assert await one.use(100, 40, 40) is None
        one.budgets.apply(Feed(revision=2, removed_tenants=(TENANT,)))
        assert one.shared is not None
        assert "tenants=0" in repr(one.shared)
        assert await one.use(100, 40, 40) is None, "of a tenant without a row nothing is counted"
        one.tell(ledger.row())
        assert await one.use(100, 40, 40) is None
        one.budgets.apply(Feed(revision=3, full=True))
        assert "tenants=0" in repr(one.shared)


async def test_tenant_that_is_removed_meanwhile_holds_no_lease(redis: RedisServer) -> None:
    """One request waits for the store, and nobody asks for the tenant again: there is nothing to renew."""
    async with asyncio.timeout(60), door(redis) as one:
        one.tell(Ledger().row())
        before = asyncio.create_task(one.try_hold(100, 10))
        await asyncio.sleep(0)
        one.budgets.apply(Feed(revision=2, removed_tenants=(TENANT,)))
        assert await before == BudgetUnavailable(1.0)
        assert "tenants=0" in repr(one.shared)


async def test_tenant_that_is_removed_during_renewals_ends_none_of_them(redis: RedisServer) -> None:
    """Leases are renewed one after the other, and the feed goes on meanwhile."""
    async with asyncio.timeout(60), door(redis) as one:
        for tenant in ("a", "b"):
            one.tell(Ledger(tenant=tenant).row())
            assert await one.use(100, 40, 40) is None
        tending = asyncio.create_task(one.tend())
        await asyncio.sleep(0)
        one.budgets.apply(Feed(revision=2, removed_tenants=("b",)))
        await tending
        assert "tenants=1" in repr(one.shared)


async def test_tenant_that_comes_back_meanwhile_is_served(redis: RedisServer) -> None:
    """One request waits for the store since before its tenant was removed, another one since it is back."""
    async with asyncio.timeout(60), door(redis) as one:
        one.tell(Ledger().row())
        before = asyncio.create_task(one.try_hold(100, 10))
        await asyncio.sleep(0)
        one.budgets.apply(Feed(revision=2, removed_tenants=(TENANT,)))
        one.tell(Ledger().row())
        after = asyncio.create_task(one.try_hold(100, 10))
        assert await after is None
        assert await before in (None, BudgetUnavailable(1.0))


async def test_few_requests_query_the_budget_store(redis: RedisServer) -> None:
    """One after another, of which each may cost a thousandth of the budget: a tenth, and the renewals. Beyond it: once
    in a while. The control's cost as much as is leased ahead: each asks.
    """
    async with asyncio.timeout(60), door(redis) as here:
        here.tell(Ledger().row())
        assert await here.use(BUDGET * PARTS, 1, 1) is None  # from now on the script is known there
        before = redis.count_scripts()
        for _ in range(300):
            assert await here.use(BUDGET * PARTS, BUDGET // 10, BUDGET // 10) is None
        assert 0 < redis.count_scripts() - before <= 30
        before = redis.count_scripts()
        for _ in range(300):
            assert await here.use(BUDGET, BUDGET, 0) is not None
        assert redis.count_scripts() - before <= 1
        before = redis.count_scripts()
        for _ in range(30):
            await here.use(BUDGET * PARTS, BUDGET, BUDGET)
        assert redis.count_scripts() - before >= 10


@pytest.mark.parametrize("fault", ["killed", "paused"])
async def test_budget_ends_with_its_lease_without_redis(fault: str, redis: RedisServer) -> None:
    """What is leased, until it is used or its time is over; then nobody enters, nobody waits for it twice, and who is
    refused is told to come back. When Redis is there again it is told what was spent.
    """
    async with asyncio.timeout(60), door(redis, answer_s=2.0) as here, door(redis, "two") as other:
        assert here.store is not None
        for each in (here, other):
            each.tell(Ledger().row())
        assert await here.use(BUDGET, 90, 90) is None
        redis.kill() if fault == "killed" else redis.pause()
        assert await here.use(BUDGET, BUDGET // PARTS, 5) is None
        assert await here.try_hold(BUDGET, 6) == BudgetUnavailable(1.0)
        assert await here.use(BUDGET, 5, 4) is None, "of the last lease"
        here.clock.now_s += BUDGETS.good_s
        commands = here.store.commands
        assert await here.try_hold(BUDGET, 1) == BudgetUnavailable(1.0)
        assert here.store.commands == commands
        redis.start() if fault == "killed" else redis.resume()
        await wait_until_up(here.store)
        await here.tend()
        assert await other.try_hold(BUDGET, BUDGET - 99 - BUDGET // PARTS + 1) is not None
        other.clock.now_s += QUIET_S
        assert await other.try_hold(BUDGET, BUDGET - 99 - BUDGET // PARTS) is None


async def test_silent_activator_loses_its_budget_lease(redis: RedisServer) -> None:
    """After its time, and not before; who ends gives back what it did not use, and keeps what the ledger lacks."""
    async with asyncio.timeout(60), door(redis) as here, door(redis, "two") as other:
        for each in (here, other):
            each.tell(Ledger().row())
        assert await here.try_hold(BUDGET, 500) is None
        assert await other.try_hold(BUDGET, 600) == BudgetSpent(BUDGET, 600)
        assert 0 < int(redis.ask("PTTL", KEY)[1:]) <= 60_000
        ends_s = redis.ask("TIME").split()[2].decode()
        assert redis.ask("HSET", KEY, "one", f'"510 {ends_s}"') == b":0"  # as if a minute had passed
        other.clock.now_s += QUIET_S
        assert await other.try_hold(BUDGET, 600) is None
        other.end(0, 200)
        assert other.shared is not None
        await other.shared.close()
        assert b"\n200 " in redis.ask("HGET", KEY, "two")
