"""Turns are bounded, also of one tenant, waited for a little, and given back whoever leaves and why."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from contracts.errors import Refused
from contracts.traffic_errors import Overloaded
from snapshotter.bodies import read_body
from snapshotter.pushes import CHUNKS_AT_ONCE, PLAN_BYTES, PLANS_AT_ONCE
from snapshotter.turns import ByteRoom, Turns
from tests.snapshotter.test_bodies import SECOND, SlowRequest
from tests.virtual_loop import run_virtually


def test_turns() -> None:
    """The third of two is told to come back; a turn that was given back, also by an error, is free again."""

    async def fail_inside(turns: Turns) -> None:
        async with turns.take("b"):
            with pytest.raises(Refused) as caught:
                await turns.take("c", wait_s=0).__aenter__()
            assert caught.value.failure == Overloaded("the bench", 2, 1.0)
            raise ZeroDivisionError

    async def scenario() -> None:
        turns = Turns("the bench", 2)
        async with turns.take("a"):
            with pytest.raises(ZeroDivisionError):
                await fail_inside(turns)
            async with turns.take("b", wait_s=0):
                waiter = asyncio.create_task(turns.take("c").__aenter__())
                await asyncio.sleep(0)
                waiter.cancel()
                await asyncio.gather(waiter, return_exceptions=True)
        async with turns.take("a", wait_s=0), turns.take("b", wait_s=0):
            assert repr(turns) == "<Turns the bench limit=2 tenants=2>"
        assert repr(turns) == "<Turns the bench limit=2 tenants=0>"  # nothing is kept of who has none

    asyncio.run(scenario())


@pytest.mark.parametrize("at_once", [PLANS_AT_ONCE, CHUNKS_AT_ONCE])
def test_slow_bodies_hold_up_their_own_tenant_alone(at_once: int) -> None:
    """As many as there are turns come at the least rate: half of them are read, another tenant has its turn at once."""

    async def read_slowly(turns: Turns) -> float:
        async with turns.take("slow"):
            await read_body(cast(Request, SlowRequest([(1.0, SECOND)] * 60)), PLAN_BYTES)
        return asyncio.get_running_loop().time()

    async def scenario() -> None:
        turns = Turns("the list of bodies", at_once)
        slow = [asyncio.create_task(read_slowly(turns)) for _ in range(at_once)]
        await asyncio.sleep(1)
        async with turns.take("quick", wait_s=0):
            pass
        ends = await asyncio.gather(*slow, return_exceptions=True)
        assert ends[: at_once // 2] == [60.0] * (at_once // 2)
        for end in ends[at_once // 2 :]:
            assert isinstance(end, Refused)
            assert end.failure == Overloaded("the list of bodies", at_once, 1.0)
        assert asyncio.get_running_loop().time() == 60.0

    run_virtually(scenario())


@dataclass(frozen=True)
class Visit:
    """Times are in seconds; `leaves_s` is when it is cancelled, wherever it is then."""

    tenant: str
    comes_s: int
    stays_s: int
    leaves_s: int | None


VISITS = st.lists(
    st.builds(
        Visit,
        tenant=st.sampled_from("abc"),
        comes_s=st.integers(0, 8),
        stays_s=st.integers(0, 8),
        leaves_s=st.none() | st.integers(0, 20),
    ),
    max_size=24,
)


@given(limit=st.integers(1, 6), visits=VISITS)
def test_never_more_and_none_lost(limit: int, visits: list[Visit]) -> None:
    """Of all never more than the limit, of one tenant never more than its half; in the end all turns are free."""
    inside: Counter[str] = Counter()

    async def visit(turns: Turns, each: Visit) -> None:
        await asyncio.sleep(each.comes_s)
        async with turns.take(each.tenant):
            inside[each.tenant] += 1
            try:
                assert inside.total() <= limit
                assert inside[each.tenant] <= max(1, limit // 2)
                await asyncio.sleep(each.stays_s)
            finally:
                inside[each.tenant] -= 1

    async def scenario() -> None:
        turns, loop = Turns("the bench", limit), asyncio.get_running_loop()
        tasks = [asyncio.create_task(visit(turns, each)) for each in visits]
        for task, each in zip(tasks, visits, strict=True):
            if each.leaves_s is not None:
                loop.call_later(each.leaves_s, task.cancel)
        for ended, each in zip(await asyncio.gather(*tasks, return_exceptions=True), visits, strict=True):
            if isinstance(ended, Refused):
                assert ended.failure == Overloaded("the bench", limit, 1.0)
            elif isinstance(ended, asyncio.CancelledError):
                assert each.leaves_s is not None
            else:
                assert ended is None
        assert repr(turns) == f"<Turns the bench limit={limit} tenants=0>"
        async with AsyncExitStack() as all_of_them:
            for number in range(limit):
                await all_of_them.enter_async_context(turns.take(f"t{number}", wait_s=0))

    run_virtually(scenario())


def test_who_waits_longest_is_next() -> None:
    """A tenant that asks for much gets its next turn after those of others that came before it."""
    order: list[str] = []

    async def visit(turns: Turns, tenant: str) -> None:
        async with turns.take(tenant):
            order.append(tenant)
            await asyncio.sleep(1)

    async def scenario() -> None:
        turns = Turns("the bench", 2)
        async with asyncio.TaskGroup() as tasks:
            for tenant in "aaaaabbc":
                tasks.create_task(visit(turns, tenant))

    run_virtually(scenario())
    assert order[:3] == ["a", "b", "c"]
    assert "".join(order[3:]) in ("abaaa", "baaaa")


def test_room_for_bodies_is_bounded_in_all_and_for_a_tenant() -> None:
    """What a body took is free again once it is dealt with, also after a refusal."""
    room = ByteRoom("the bench", 100)
    with room.hold("a") as take_a, room.hold("b") as take_b:
        take_a(50)
        with pytest.raises(Refused) as refused:
            take_a(1)
        assert isinstance(refused.value.failure, Overloaded)
        take_b(50)
        with room.hold("c") as take_c, pytest.raises(Refused):
            take_c(1)
    with room.hold("a") as take_a:
        take_a(50)
        assert "held=50/100" in repr(room)
    assert "held=0/100" in repr(room)
