"""Fair order at a version's replicas: by tokens used, not by arrival."""

import asyncio
from pathlib import Path

import pytest

from activator.queue.policy.queued_request import PriorityClass, QueuedRequest, read_priority_class
from activator.queue.throttler import Throttler
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.serving.control_messages import Priority
from tests.activator.control import replica_row
from tests.activator.queue.slot_world import FAILED, KEY, SlotWorld, run_loop
from tests.activator.replica import Held, Script, cut, hello, refuses
from tests.activator.world import CHAT, ReceivedResponse, world

LATER_S = 60.0


class NamedRequests(SlotWorld):
    """Named requests at one replica with one slot, and the order in which they got it."""

    def __init__(self) -> None:
        super().__init__(replica_row("a", 1))
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.free = asyncio.Semaphore(0)

    async def _one(self, name: str, ask: QueuedRequest, deadline_s: float, tokens: int | None) -> None:
        async with self.throttler.slot(KEY, ask, Deadline(deadline_s)) as slot:
            self.order.append(name)
            await self.free.acquire()
            slot.tokens = tokens

    async def come(self, name: str, ask: QueuedRequest, in_s: float = LATER_S, tokens: int | None = None) -> None:
        """Start a request. It holds the slot or waits. `tokens` is what it will have used."""
        self.tasks.append(asyncio.create_task(self._one(name, ask, self.clock() + in_s, tokens)))
        await run_loop()

    async def end(self, count: int) -> None:
        """End so many requests, one after the other."""
        for _ in range(count):
            self.free.release()
            await run_loop(6)
        self.throttler.check_integrity()


async def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    """Twenty requests of one tenant wait. The only request of the other one is next."""

    here = NamedRequests()
    for number in range(21):
        await here.come(f"loud{number}", QueuedRequest("loud", 10, 10))
    await here.come("quiet", QueuedRequest("quiet", 10, 10))
    await here.end(22)
    assert here.order[:2] == ["loud0", "quiet"]
    assert len(here.order) == 22


@pytest.mark.parametrize(
    ("tokens", "first"),
    [
        pytest.param(None, "waits", id="used as estimated"),
        pytest.param(10, "loud", id="used a hundredth of the estimate"),
        pytest.param(5000, "waits", id="used five times the estimate"),
    ],
)
async def test_used_tokens_are_charged_not_estimates(tokens: int | None, first: str) -> None:
    """The loud tenant's large request has ended, the other's holds the slot. Which tenant is next?"""

    here = NamedRequests()
    await here.come("holds", QueuedRequest("quiet", 10, 500))
    await here.come("large", QueuedRequest("loud", 10, 1000), tokens=tokens)
    await here.come("waits", QueuedRequest("quiet", 10, 100))
    await here.end(1)
    assert here.order == ["holds", "large"]
    await here.come("loud", QueuedRequest("loud", 10, 10))
    await here.end(1)
    assert here.order[2] == first
    await here.end(2)


async def test_the_earliest_deadline_is_next() -> None:
    """Within one tenant the earliest deadline is next."""

    here = NamedRequests()
    await here.come("holds", QueuedRequest("t", 10, 10))
    await here.come("patient", QueuedRequest("t", 10, 10), in_s=50.0)
    await here.come("hasty", QueuedRequest("t", 10, 10), in_s=40.0)
    await here.end(3)
    assert here.order == ["holds", "hasty", "patient"]


@pytest.mark.parametrize(
    ("header", "want"),
    [
        pytest.param(None, PriorityClass.INTERACTIVE, id="no header"),
        pytest.param(b"batch", PriorityClass.BATCH, id="batch"),
        pytest.param(b"Standard", PriorityClass.STANDARD, id="any letter case"),
        pytest.param(b"interactive", PriorityClass.INTERACTIVE, id="the highest"),
        pytest.param(b"urgent", None, id="an unknown class"),
        pytest.param(b"\xff", None, id="not ASCII"),
        pytest.param(b"", None, id="empty"),
    ],
)
def test_priority_header_sets_the_priority_class(header: bytes | None, want: PriorityClass | None) -> None:
    """An invalid header is refused with its name."""
    if want is not None:
        assert read_priority_class(header) is want
        return
    with pytest.raises(Refused, match="x-kelvin-priority") as refused:
        read_priority_class(header)
    assert isinstance(refused.value.failure, InvalidRequest)


@pytest.mark.parametrize(
    ("header", "highest", "want"),
    [
        pytest.param(None, "standard", PriorityClass.STANDARD, id="the tenant's is the default"),
        pytest.param(b"interactive", "standard", PriorityClass.STANDARD, id="a request can't raise itself"),
        pytest.param(b"interactive", "batch", PriorityClass.BATCH, id="a request can't raise itself from batch"),
        pytest.param(b"batch", "standard", PriorityClass.BATCH, id="a request may lower itself"),
        pytest.param(
            b"standard", "interactive", PriorityClass.STANDARD, id="a request may lower itself from interactive"
        ),
    ],
)
def test_tenant_maximum_caps_the_priority_class(header: bytes | None, highest: Priority, want: PriorityClass) -> None:
    """A request can only lower its own priority."""
    assert read_priority_class(header, highest) is want


def _counters(throttler: Throttler, tenant: str) -> float:
    return throttler._version_queues[KEY].waiting._priority_lanes[PriorityClass.INTERACTIVE].counters.counter_of(tenant)


@pytest.mark.parametrize(
    "leaves_first",
    [pytest.param(True, id="before its slot is granted"), pytest.param(False, id="just after its slot is granted")],
)
async def test_cancelled_request_is_not_charged(leaves_first: bool) -> None:
    """The request is cancelled before or just after its slot is granted, and its task has not run since."""

    here = NamedRequests()
    replica = await here.acquire()
    await here.come("leaves", QueuedRequest("t", 10, 1000))
    if leaves_first:
        here.tasks[0].cancel()
    here.release(replica)
    here.tasks[0].cancel()
    await run_loop()
    assert here.order == []
    assert replica.running == 0
    assert _counters(here.throttler, "t") <= 1


async def test_refused_request_is_not_charged() -> None:
    """Its start failed while another replica of the version drains."""

    here = NamedRequests()
    here.feed(replica_row("a", draining=True))
    await here.come("waits", QueuedRequest("t", 10, 1000))
    here.feed(failures=(FAILED,))
    await run_loop()
    assert isinstance(here.tasks[0].exception(), Refused)
    assert _counters(here.throttler, "t") <= 1


_rejected = refuses(InvalidRequest("temperature", "9", "must be 2 or less"))


@pytest.mark.parametrize(
    ("script", "status", "times"),
    [
        pytest.param(hello, 200, 3, id="they used five tokens each"),
        pytest.param(_rejected, 400, 3, id="they were refused by the replica"),
        pytest.param(cut, 502, 1, marks=pytest.mark.deep, id="the replica was lost three times"),
    ],
)
async def test_priority_classes_share_by_used_tokens(tmp_path: Path, script: Script, status: int, times: int) -> None:
    """Over HTTP: three interactive requests could have used a thousand tokens each. A batch request holds the slot,
    another one waits, then an interactive one comes and is next. It would not be in order of arrival, or if estimates
    were charged: a sixteenth of three thousand is more than the batch request's share.
    """

    held = Held()

    async with world(tmp_path, breaker_s=1) as here:
        replica = await here.replica("a", script, max_streams=1)

        async def holding() -> asyncio.Task[ReceivedResponse]:
            while True:
                sent = send("holds", "batch", 1)
                arrived = asyncio.create_task(replica.until(lambda r: len(r.calls) == 4))
                await asyncio.wait((sent, arrived), return_when=asyncio.FIRST_COMPLETED)
                if arrived.done():
                    return sent
                arrived.cancel()
                assert sent.result().code == "breaker_open"

        def send(name: str, priority: str, max_tokens: int) -> asyncio.Task[ReceivedResponse]:
            body = CHAT | {"user": name, "max_tokens": max_tokens}
            return asyncio.create_task(here.post(body=body, x_kelvin_priority=priority))

        for _ in range(times):
            assert (await send("before", "interactive", 1000)).status == status
        assert len(replica.calls) == 3
        replica.script = held
        sent = [await holding()]
        for count, (name, priority) in enumerate((("batch", "batch"), ("interactive", "interactive")), 1):
            sent.append(send(name, priority, 1))
            await here.wait_for_queued(count)
        held.release()
        assert [got.status for got in await asyncio.gather(*sent)] == [200, 200, 200]
        assert [call.wanted["user"] for call in replica.calls[3:]] == ["holds", "interactive", "batch"]
        got = await here.post(x_kelvin_priority="urgent")
        assert (got.status, got.code) == (400, "invalid_request")
