"""InFlightRequests: requests are found by their ids and cancelled at most once. Ended requests leave only their ids."""

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


async def _run_until_cancelled(entry: InFlightRequest) -> str:
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(Refused) as caught, entry.bind_task(task):
        async with asyncio.timeout(30):
            await asyncio.Event().wait()
    assert caught.value.failure == Cancelled()
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # nothing cancels the task again
    return "cancelled"


@pytest.mark.parametrize("name", ["r1", "mine"])
async def test_request_is_cancelled_by_either_id_idempotently(name: str) -> None:
    """The cancelled task ends once. A second cancellation returns the same entry and waits for the same end."""

    in_flight = InFlightRequests()
    entry = in_flight.add(account(), b"mine")
    task = asyncio.create_task(_run_until_cancelled(entry))
    await asyncio.sleep(0)
    assert in_flight.cancel(OTHER, name) is None
    assert in_flight.cancel(CALLER, name) == in_flight.cancel(CALLER, name) == [entry]
    assert await task == "cancelled"
    in_flight.check_integrity()
    waiting = asyncio.create_task(entry.wait_ended(30.0))
    await asyncio.sleep(0)
    assert not waiting.done(), "its record is being written"
    in_flight.remove(entry)
    assert await waiting
    assert await entry.wait_ended(0.0), "a request that has ended is not waited for"
    assert in_flight.cancel(CALLER, name) == []
    assert in_flight.cancel(OTHER, name) is None
    in_flight.check_integrity()
    assert repr(in_flight) == "<InFlightRequests requests=0 named=0>"


async def test_an_answer_whose_record_is_written_stands() -> None:
    """Once the usage record is settled, a cancellation doesn't end the request, so the caller and the record agree."""

    in_flight = InFlightRequests()
    settled = account()
    entry = in_flight.add(settled, None)
    task = asyncio.current_task()
    assert task is not None
    with entry.bind_task(task):
        settled.is_settled = True
        assert in_flight.cancel(CALLER, "r1") == [entry]
        await asyncio.sleep(0)
    assert not entry.is_cancelled
    assert not await entry.wait_ended(0.0)


async def test_a_cancellation_of_another_kind_is_passed_on() -> None:
    """A drain or a client disconnect also cancels the task. Only a cancellation by id becomes `Cancelled`."""

    task = asyncio.create_task(_run_until_cancelled(InFlightRequests().add(account(), None)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_remembered_cancellations_are_bounded() -> None:
    """Only the two latest request ids are remembered. The oldest is forgotten first."""
    in_flight = InFlightRequests(remembered=2)
    for request_id in ("r1", "r2", "r3"):
        entry = in_flight.add(account(request_id), None)
        in_flight.cancel(CALLER, request_id)
        in_flight.remove(entry)
    assert [in_flight.cancel(CALLER, name) for name in ("r1", "r2", "r3")] == [None, [], []]
