"""Names of requests under way: each ends once, by its own block, and no more is kept of it than that it was."""

import asyncio

import pytest

from activator.accounting.in_flight_requests import InFlightRequest, InFlightRequests
from activator.accounting.request_account import Account
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import Principal, Scope
from kelvin.contracts.timeline import Timeline
from kelvin.contracts.traffic_errors import Cancelled

CALLER = Principal(key_id="k", tenant="t", scopes=(Scope.INFER,))
OTHER = Principal(key_id="k", tenant="u", scopes=(Scope.INFER,))


def account(request_id: str = "r1") -> Account:
    return Account(request_id, CALLER, "m", stream=False, started_at_us=0, timeline=Timeline(0))


async def _run(entry: InFlightRequest) -> str:
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(Refused) as caught, entry.bind_task(task):
        async with asyncio.timeout(30):
            await asyncio.Event().wait()
    assert caught.value.failure == Cancelled()
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # what follows is not cut short
    return "cancelled"


@pytest.mark.parametrize("name", ["r1", "mine"])
async def test_request_is_cancelled_by_either_id_idempotently(name: str) -> None:
    """It ends as cancelled, once; who asks again while it ends waits with the first."""

    under_way = InFlightRequests()
    entry = under_way.enter(account(), b"mine")
    task = asyncio.create_task(_run(entry))
    await asyncio.sleep(0)
    assert under_way.cancel(OTHER, name) is None
    assert under_way.cancel(CALLER, name) == under_way.cancel(CALLER, name) == [entry]
    assert await task == "cancelled"
    under_way.check_integrity()
    waiting = asyncio.create_task(entry.wait_ended(30.0))
    await asyncio.sleep(0)
    assert not waiting.done(), "its record is being written"
    under_way.leave(entry)
    assert await waiting
    assert await entry.wait_ended(0.0), "who asks when it is over is told so"
    assert under_way.cancel(CALLER, name) == []
    assert under_way.cancel(OTHER, name) is None
    under_way.check_integrity()
    assert repr(under_way) == "<InFlightRequests requests=0 named=0>"


async def test_an_answer_whose_record_is_written_stands() -> None:
    """Else the caller would be told of an end that the record doesn't know."""

    under_way = InFlightRequests()
    settled = account()
    entry = under_way.enter(settled, None)
    task = asyncio.current_task()
    assert task is not None
    with entry.bind_task(task):
        settled.is_settled = True
        assert under_way.cancel(CALLER, "r1") == [entry]
        await asyncio.sleep(0)
    assert not entry.is_cancelled
    assert not await entry.wait_ended(0.0)


async def test_a_cancellation_of_another_kind_is_passed_on() -> None:
    """The drain's, or a client's that left."""

    task = asyncio.create_task(_run(InFlightRequests().enter(account(), None)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_what_is_remembered_is_bounded() -> None:
    """The oldest name is forgotten first."""
    under_way = InFlightRequests(remembered=2)
    for request_id in ("r1", "r2", "r3"):
        entry = under_way.enter(account(request_id), None)
        under_way.cancel(CALLER, request_id)
        under_way.leave(entry)
    assert [under_way.cancel(CALLER, name) for name in ("r1", "r2", "r3")] == [None, [], []]
