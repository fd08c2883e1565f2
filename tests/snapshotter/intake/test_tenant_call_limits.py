"""Turns and memory of requests are bounded in all and per tenant, and every exit gives them back."""

import asyncio
from collections import Counter
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message, Receive, Send

from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Overloaded
from snapshotter.intake.request_bodies import BufferedResponse, read_body
from snapshotter.intake.tenant_call_limits import BodyBudget, CallLimiter, KeyedLocks
from snapshotter.push.pushes import MAX_PLANS, PLAN_BYTES, PLAN_WAIT_S
from tests.snapshotter.intake.test_request_bodies import SlowRequest


async def test_turns_are_bounded_and_returned() -> None:
    """The third request of two turns is refused after its wait. Errors and cancellations free their turns."""

    async def fail_inside(turns: CallLimiter) -> None:
        async with turns.hold_permit("b"):
            with pytest.raises(Refused) as caught:
                await turns.hold_permit("c", wait_s=0).__aenter__()
            assert caught.value.failure == Overloaded("the bench", 2, 1.0)
            raise ZeroDivisionError

    turns = CallLimiter("the bench", 2)
    async with turns.hold_permit("a"):
        with pytest.raises(ZeroDivisionError):
            await fail_inside(turns)
        async with turns.hold_permit("b", wait_s=0):
            waiter = asyncio.create_task(turns.hold_permit("c").__aenter__())
            await asyncio.sleep(0)
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
    async with turns.hold_permit("a", wait_s=0), turns.hold_permit("b", wait_s=0):
        assert repr(turns) == "<CallLimiter the bench limit=2 tenants=2>"
    assert repr(turns) == "<CallLimiter the bench limit=2 tenants=0>"  # a tenant without turns leaves no entry


@dataclass(frozen=True)
class Visit:
    """One request. Times are in seconds; `leaves_s` is when it is cancelled."""

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


@pytest.mark.virtual_time
@given(limit=st.integers(1, 6), visits=VISITS)
async def test_turns_stay_within_bounds_and_none_is_lost(limit: int, visits: list[Visit]) -> None:
    """All tenants together stay within the limit, one tenant within half of it, and in the end all turns are free."""
    inside: Counter[str] = Counter()

    async def visit(turns: CallLimiter, each: Visit) -> None:
        await asyncio.sleep(each.comes_s)
        async with turns.hold_permit(each.tenant):
            inside[each.tenant] += 1
            try:
                assert inside.total() <= limit
                assert inside[each.tenant] <= max(1, limit // 2)
                await asyncio.sleep(each.stays_s)
            finally:
                inside[each.tenant] -= 1

    turns, loop = CallLimiter("the bench", limit), asyncio.get_running_loop()
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
    assert repr(turns) == f"<CallLimiter the bench limit={limit} tenants=0>"
    async with AsyncExitStack() as all_of_them:
        for number in range(limit):
            await all_of_them.enter_async_context(turns.hold_permit(f"t{number}", wait_s=0))


@pytest.mark.virtual_time
async def test_longest_waiting_tenant_is_next() -> None:
    """A tenant with many requests gets its next turn after tenants that waited longer."""
    order: list[str] = []

    async def visit(turns: CallLimiter, tenant: str) -> None:
        async with turns.hold_permit(tenant):
            order.append(tenant)
            await asyncio.sleep(1)

    turns = CallLimiter("the bench", 2)
    async with asyncio.TaskGroup() as tasks:
        for tenant in "aaaaabbc":
            tasks.create_task(visit(turns, tenant))
    assert order[:3] == ["a", "b", "c"]
    assert "".join(order[3:]) in ("abaaa", "baaaa")


def _receive(
    budget: BodyBudget, tenant: str, *pieces: tuple[float, bytes], turn: AbstractAsyncContextManager[None] | None = None
) -> AbstractAsyncContextManager[bytearray]:
    return budget.receive(tenant, partial(read_body, cast(Request, SlowRequest(pieces)), PLAN_BYTES), turn)


@pytest.mark.virtual_time
async def test_memory_for_bodies_is_bounded() -> None:
    """The bytes of a body are free after its request, also after a refusal. A complete body is never cut."""
    budget = BodyBudget("the bench", 100)
    half = (0.0, bytes(50))
    async with _receive(budget, "a", half) as body, _receive(budget, "b", half):
        assert body == half[1]
        for tenant in "ac":
            with pytest.raises(Refused) as refused:
                await _receive(budget, tenant, (0.0, b"x")).__aenter__()
            assert refused.value.failure == Overloaded("the bench", 100, 1.0, "bytes")
        assert "held=100/100" in repr(budget)
    async with _receive(budget, "a", half):
        with pytest.raises(Refused):  # the other half is for other tenants
            await _receive(budget, "a", (0.0, b"x")).__aenter__()
        assert "held=50/100" in repr(budget)
    assert "held=0/100" in repr(budget)


@pytest.mark.virtual_time
async def test_unfinished_bodies_give_way_to_other_tenants() -> None:
    """Two tenants fill the memory with unfinished bodies. The oldest body of each gives way to a third tenant."""

    async def stall(budget: BodyBudget, tenant: str, nbytes: int) -> None:
        async with _receive(budget, tenant, (0.0, bytes(nbytes)), (1000.0, b"")):
            raise AssertionError("a body that stalls was received")

    budget = BodyBudget("the bench", 100)
    stalled = [asyncio.create_task(stall(budget, tenant, 25)) for tenant in "aabb"]
    await asyncio.sleep(1)
    assert "held=100/100" in repr(budget)
    async with _receive(budget, "c", (0.0, bytes(20)), (0.0, bytes(20))) as body:
        assert len(body) == 40
        with pytest.raises(Refused):  # tenants with equal use keep their bytes
            await _receive(budget, "d", (0.0, bytes(30))).__aenter__()
    assert asyncio.get_running_loop().time() == 1
    ends = await asyncio.gather(*stalled, return_exceptions=True)
    is_cut = [isinstance(end, Refused) and isinstance(end.failure, Overloaded) for end in ends]
    assert is_cut == [True, False, True, False]
    assert "held=0/100" in repr(budget)


@pytest.mark.virtual_time
async def test_unread_answers_give_way() -> None:
    """If clients do not read, the tenant's oldest answer is cut for another tenant, and its bytes are free."""
    budget = BodyBudget("the bench", 100)
    sent: list[bytes] = []

    async def stall(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(1000)

    async def take(message: Message) -> None:
        sent.append(message.get("body", b""))

    async def answer(tenant: str, nbytes: int, send: Send) -> None:
        await BufferedResponse(bytes(nbytes), "x", budget, tenant)({}, cast(Receive, None), send)

    stalled = [asyncio.create_task(answer(tenant, 25, stall)) for tenant in "aabb"]
    await asyncio.sleep(1)
    with pytest.raises(Refused, match="overloaded"):
        await answer("a", 1, take)
    await answer("c", 25, take)
    assert b"".join(sent) == bytes(25)
    await asyncio.sleep(1)
    assert [each.done() for each in stalled] == [True, False, False, False]
    assert "held=75/100" in repr(budget)
    for each in stalled:
        each.cancel()
    await asyncio.gather(*stalled, return_exceptions=True)
    assert "held=0/100" in repr(budget)


@pytest.mark.virtual_time
async def test_waiting_plans_give_way_to_a_third_tenant() -> None:
    """Two tenants fill the memory with complete plans that are slow to judge, and send the next one at once.

    A plan that waits for its turn gives way, and the third tenant gets the next turn.
    """
    judged_s = 100.0

    budget, turns = BodyBudget("the bench", 400), CallLimiter("plans", MAX_PLANS)
    loop = asyncio.get_running_loop()

    async def push(tenant: str, seconds: float) -> None:
        async with _receive(budget, tenant, (0.0, bytes(100)), turn=turns.hold_permit(tenant, PLAN_WAIT_S)):
            await asyncio.sleep(seconds)

    async def attack(tenant: str, begins_s: float) -> None:
        await asyncio.sleep(begins_s)
        while True:
            with suppress(Refused):
                await push(tenant, judged_s)
            await asyncio.sleep(0.01)

    attacks = [asyncio.create_task(attack(tenant, at_s)) for at_s, tenant in enumerate("aabb")]
    await asyncio.sleep(50)
    for _ in range(5):
        assert "held=400/400" in repr(budget)
        began_s = loop.time()
        await push("third", 1.0)
        assert loop.time() - began_s <= judged_s
        await asyncio.sleep(5)
    for each in attacks:
        each.cancel()
    await asyncio.gather(*attacks, return_exceptions=True)
    assert "held=0/400" in repr(budget)
    assert "tenants=0" in repr(turns)


@pytest.mark.virtual_time
@pytest.mark.parametrize("leaves_s", [0.5, 1.5, 2.5], ids=["while it is sent", "while it waits", "while it is judged"])
async def test_client_that_leaves_gives_back_bytes_and_turn(leaves_s: float) -> None:
    """Cancellation frees both while the body is sent, waits or is judged."""
    budget, turns = BodyBudget("the bench", 100), CallLimiter("plans", 1)

    async def push(tenant: str, seconds: float) -> None:
        async with _receive(budget, tenant, (0.0, b"x"), (1.0, b"y"), turn=turns.hold_permit(tenant, PLAN_WAIT_S)):
            await asyncio.sleep(seconds)

    first = asyncio.create_task(push("a", 1.0))
    await asyncio.sleep(0)
    leaving = asyncio.create_task(push("b", 1000.0))
    await asyncio.sleep(leaves_s)
    leaving.cancel()
    await asyncio.gather(first, leaving, return_exceptions=True)
    assert "held=0/100" in repr(budget)
    async with turns.hold_permit("c", wait_s=0):
        pass


async def test_locks_exclude_by_name() -> None:
    """Holders of one name never overlap, and holders of two names do. A cancelled waiter leaves no trace."""
    locks = KeyedLocks()
    inside: list[str] = []
    meeting = asyncio.Barrier(2)

    async def hold(name: str) -> None:
        async with locks.hold(name):
            assert name not in inside
            inside.append(name)
            async with asyncio.timeout(30):
                await meeting.wait()  # waits for the other name's holder
            inside.remove(name)

    async with asyncio.TaskGroup() as tasks:
        for name in ("a", "b", "a", "b"):
            tasks.create_task(hold(name))
    async with locks.hold("a"):
        waiter = asyncio.create_task(hold("a"))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert len(locks) == 1
    assert len(locks) == 0
    assert repr(locks) == "<KeyedLocks []>"
