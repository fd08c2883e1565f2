"""A monthly budget, of one activator and of several over one real Redis: the same behaviour, and the shared limit."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack

import pytest

from activator.limits.policy.held_quota import BUDGETS
from kelvin.contracts.accounting.spending import SpendingRow
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.traffic_errors import BudgetSpent, BudgetUnavailable
from tests.activator.limits.spending import END_US, TENANT, BudgetActivator, Ledger, alone, budget_activator, over_redis
from tests.activator.redis_server import RedisServer, wait_until_up

BUDGET = 1000
PARTS, QUIET_S = BUDGETS.parts, BUDGETS.query_pause_s
KEY = f"kelvin:{{{TENANT}}}:budget:2026-11"

EACH = pytest.mark.parametrize("opened", [alone, over_redis])
Opened = Callable[[], AbstractAsyncContextManager[BudgetActivator]]


@EACH
async def test_shared_budget_is_spent_up_to_its_limit(opened: Opened) -> None:
    """A running request counts with the most it may cost, an ended one with its cost. Records in the ledger count once.
    A raised budget applies at once.
    """
    async with opened() as here:
        ledger = Ledger(spent=100)
        here.tell(ledger.row())
        assert await here.try_hold(BUDGET, 600) is None
        assert await here.try_hold(BUDGET, 301) == BudgetSpent(BUDGET, 301)
        assert await here.try_hold(BUDGET, 300) is None
        here.clock.now_s += QUIET_S
        assert await here.try_hold(BUDGET, 0) == BudgetSpent(BUDGET), "nothing is left, even for a free request"
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
    """Before the first row nothing costs anything. A budget of 0 still refuses."""
    async with opened() as here:
        assert await here.use(1, 600, 0) is None
        assert await here.use(0, 600, 0) == BudgetSpent(0)


@EACH
async def test_leases_restart_in_a_new_month(opened: Opened) -> None:
    """The new month begins with the running requests. Nothing leased or spent in the old month counts."""
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
    """Ten concurrent requests share a budget for five. A cancelled waiter holds nothing."""
    async with opened() as here:
        here.tell(Ledger().row())
        refusals = await asyncio.gather(*(here.try_hold(BUDGET, 200) for _ in range(10)))
        assert refusals == [None] * 5 + [BudgetSpent(BUDGET, 200)] * 5
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


@pytest.mark.parametrize("shared", [pytest.param(True, id="one Redis"), pytest.param(False, id="control: three")])
def test_several_never_pass_the_budget(shared: bool) -> None:
    """Requests begin, end and are shipped, and ledger rows reach each activator at a different time. Ledger, records
    and running requests together never exceed the budget. Once all is reported, the whole budget can be spent.
    """

    async def scenario(servers: list[RedisServer], draw: random.Random) -> None:
        ledger = Ledger()
        rows: list[SpendingRow] = [ledger.row()]
        most_committed = 0
        async with asyncio.timeout(120), AsyncExitStack() as stack:
            activators = [
                await stack.enter_async_context(budget_activator(server, f"{draw.random()}"))
                for server in (servers if shared else servers[1:] + servers[:1])
            ]
            rows_received = [0] * len(activators)
            for each in activators:
                each.tell(rows[0])  # before the first row nothing costs anything
            for _ in range(400):
                at = draw.randrange(len(activators))
                one = activators[at]
                match draw.randrange(6):
                    case 0 | 1:
                        one.clock.now_s += draw.choice((0.0, QUIET_S))
                        await one.try_hold(BUDGET, draw.randrange(60))
                    case 2:
                        await asyncio.gather(*(each.try_hold(BUDGET, draw.randrange(30)) for each in activators))
                    case 3 if one.held:
                        which = draw.randrange(len(one.held))
                        one.end(which, draw.randrange(one.held[which][1] // 4 + 1))
                    case 4:
                        one.ship(ledger)
                        rows.append(ledger.row())
                    case 5:
                        rows_received[at] = draw.randrange(rows_received[at], len(rows))
                        one.tell(rows[rows_received[at]])
                        if draw.randrange(2):
                            await one.tend()
                    case _:
                        pass
                most_committed = max(most_committed, ledger.spent + sum(each.committed for each in activators))
            assert (most_committed <= BUDGET) == shared, most_committed
            for each in activators:
                while each.held:
                    each.end(0, 0)
                each.ship(ledger)
            for _ in range(3):  # the first renewal keeps what was used lately
                for each in activators:
                    each.tell(ledger.row())
                    await each.tend()
            activators[0].clock.now_s += QUIET_S
            if shared and ledger.spent < BUDGET:
                assert await activators[0].try_hold(BUDGET, BUDGET - ledger.spent) is None

    with ExitStack() as stack:
        servers = [stack.enter_context(RedisServer()) for _ in range(1 if shared else 3)] * (3 if shared else 1)
        for seed in range(5):
            for server in servers:
                server.ask("FLUSHALL")
            asyncio.run(scenario(servers, random.Random(seed)))


@pytest.mark.parametrize("early", [False, True])
async def test_amount_in_the_ledger_is_no_longer_leased(early: bool, redis: RedisServer) -> None:
    """The ledger row may arrive before or after the record is known to be durable. The rest is not leased twice."""
    async with asyncio.timeout(60), budget_activator(redis) as here, budget_activator(redis, "two") as other:
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


async def test_units_used_during_a_query_stay_leased(redis: RedisServer) -> None:
    """The ledger has what the first activator's lease was for, and the second one knows, so the store has nothing left.
    Units that the second one uses of its own lease while it asks stay leased.
    """
    async with asyncio.timeout(60), budget_activator(redis) as one, budget_activator(redis, "two") as two:
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
    """The ledger has them, and the tenant comes back: they are charged once."""
    async with asyncio.timeout(60), budget_activator(redis) as one:
        ledger = Ledger()
        one.tell(ledger.row())
        assert await one.use(100, 40, 40) is None
        one.budgets.apply(Feed(revision=2, removed_tenants=(TENANT,)))
        assert one.shared is not None
        assert "tenants=0" in repr(one.shared)
        assert await one.use(100, 40, 40) is None, "a tenant without a row is not counted"
        one.tell(ledger.row())
        assert await one.use(100, 40, 40) is None
        one.budgets.apply(Feed(revision=3, full=True))
        assert "tenants=0" in repr(one.shared)


async def test_tenant_that_is_removed_meanwhile_holds_no_lease(redis: RedisServer) -> None:
    """A request waits for the store, and the tenant never returns. Nothing is left to renew."""
    async with asyncio.timeout(60), budget_activator(redis) as one:
        one.tell(Ledger().row())
        earlier_request = asyncio.create_task(one.try_hold(100, 10))
        await asyncio.sleep(0)
        one.budgets.apply(Feed(revision=2, removed_tenants=(TENANT,)))
        assert await earlier_request == BudgetUnavailable(1.0)
        assert "tenants=0" in repr(one.shared)


async def test_tenant_removed_during_renewals_ends_none_of_them(redis: RedisServer) -> None:
    """Leases are renewed one after the other, and the feed goes on meanwhile."""
    async with asyncio.timeout(60), budget_activator(redis) as one:
        for tenant in ("a", "b"):
            one.tell(Ledger(tenant=tenant).row())
            assert await one.use(100, 40, 40) is None
        tending = asyncio.create_task(one.tend())
        await asyncio.sleep(0)
        one.budgets.apply(Feed(revision=2, removed_tenants=("b",)))
        await tending
        assert "tenants=1" in repr(one.shared)


async def test_tenant_that_comes_back_meanwhile_is_served(redis: RedisServer) -> None:
    """One request waits since before its tenant was removed, another one since the tenant returned."""
    async with asyncio.timeout(60), budget_activator(redis) as one:
        one.tell(Ledger().row())
        earlier_request = asyncio.create_task(one.try_hold(100, 10))
        await asyncio.sleep(0)
        one.budgets.apply(Feed(revision=2, removed_tenants=(TENANT,)))
        one.tell(Ledger().row())
        later_request = asyncio.create_task(one.try_hold(100, 10))
        assert await later_request is None
        assert await earlier_request in (None, BudgetUnavailable(1.0))


async def test_few_requests_query_the_budget_store(redis: RedisServer) -> None:
    """Requests that cost a thousandth of the budget query Redis once per ten, refused ones once in a while. Control:
    requests as large as the lease ahead query it each time.
    """
    async with asyncio.timeout(60), budget_activator(redis) as here:
        here.tell(Ledger().row())
        assert await here.use(BUDGET * PARTS, 1, 1) is None  # from now on Redis has the script
        earlier_request = redis.count_scripts()
        for _ in range(300):
            assert await here.use(BUDGET * PARTS, BUDGET // 10, BUDGET // 10) is None
        assert 0 < redis.count_scripts() - earlier_request <= 30
        earlier_request = redis.count_scripts()
        for _ in range(300):
            assert await here.use(BUDGET, BUDGET, 0) is not None
        assert redis.count_scripts() - earlier_request <= 1
        earlier_request = redis.count_scripts()
        for _ in range(30):
            await here.use(BUDGET * PARTS, BUDGET, BUDGET)
        assert redis.count_scripts() - earlier_request >= 10


@pytest.mark.parametrize("fault", ["killed", "paused"])
async def test_budget_ends_with_its_lease_without_redis(fault: str, redis: RedisServer) -> None:
    """A lease is used up to its end. Then requests get a retryable refusal. Redis later learns what was spent."""
    async with (
        asyncio.timeout(60),
        budget_activator(redis, answer_s=2.0) as here,
        budget_activator(redis, "two") as other,
    ):
        assert here.store is not None
        for each in (here, other):
            each.tell(Ledger().row())
        assert await here.use(BUDGET, 90, 90) is None
        redis.kill() if fault == "killed" else redis.pause()
        assert await here.use(BUDGET, BUDGET // PARTS, 5) is None
        assert await here.try_hold(BUDGET, 6) == BudgetUnavailable(1.0)
        assert await here.use(BUDGET, 5, 4) is None, "the last lease covers it"
        here.clock.now_s += BUDGETS.usable_s
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
    """The lease ends after its time. A clean shutdown returns its unused part and keeps what the ledger lacks."""
    async with asyncio.timeout(60), budget_activator(redis) as here, budget_activator(redis, "two") as other:
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
