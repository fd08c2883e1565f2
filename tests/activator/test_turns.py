"""Whose turn it is at a version's replicas: fair in what was taken, not in who came first."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from activator.policy.ask import Ask, Rank, read_rank
from activator.throttler import Throttler
from contracts.control import Feed, Priority
from contracts.deadline import Deadline
from contracts.errors import InvalidRequest, Refused
from tests.activator.control import replica_row
from tests.activator.replica import Call, Script, hello
from tests.activator.test_throttler import ASK, FAILED, KEY, Bell, _feed, _throttler, _turns
from tests.activator.world import CHAT, Got, World, world

LATER_S = 60.0


class Turns:
    """Requests at one replica of one slot, which are named, and the order in which they got it."""

    def __init__(self, throttler: Throttler) -> None:
        self.throttler = throttler
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.free = asyncio.Semaphore(0)

    async def _one(self, name: str, ask: Ask, deadline_s: float, tokens: int | None) -> None:
        async with self.throttler.slot(KEY, ask, Deadline(deadline_s)) as slot:
            self.order.append(name)
            await self.free.acquire()
            slot.tokens = tokens

    async def come(self, name: str, ask: Ask, in_s: float = LATER_S, tokens: int | None = None) -> None:
        """It holds the slot or waits. `tokens` is what it will have taken."""
        deadline_s = asyncio.get_running_loop().time() + in_s
        self.tasks.append(asyncio.create_task(self._one(name, ask, deadline_s, tokens)))
        await _turns()

    async def end(self, count: int) -> None:
        """So many have ended, one after the other."""
        for _ in range(count):
            self.free.release()
            await _turns(6)
        self.throttler.check_integrity()


def _turns_of() -> Turns:
    throttler = _throttler(Bell())
    throttler.apply(_feed(replica_row("a", 1)))
    return Turns(throttler)


async def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    """Twenty of one tenant wait; the other's only request is next."""

    turns = _turns_of()
    for number in range(21):
        await turns.come(f"loud{number}", Ask("loud", 10, 10))
    await turns.come("quiet", Ask("quiet", 10, 10))
    await turns.end(22)
    assert turns.order[:2] == ["loud0", "quiet"]
    assert len(turns.order) == 22


@pytest.mark.parametrize(
    ("tokens", "first"),
    [
        pytest.param(None, "quiet", id="as estimated: both were given much, and one of them more"),
        pytest.param(10, "loud", id="it took a hundredth of what was thought"),
        pytest.param(5000, "quiet", id="it took five times as much"),
    ],
)
def test_what_was_taken_counts_not_what_was_thought(tokens: int | None, first: str) -> None:
    """One tenant's large request has ended, the other's holds the slot; whose next is first?"""

    async def scenario() -> None:
        turns = _turns_of()
        await turns.come("holds", Ask("quiet", 10, 500))
        await turns.come("large", Ask("loud", 10, 1000), tokens=tokens)
        await turns.come("waits", Ask("quiet", 10, 100))
        await turns.end(1)
        assert turns.order == ["holds", "large"]
        await turns.come("loud", Ask("loud", 10, 10))
        await turns.end(1)
        assert turns.order[2] == ("waits" if first == "quiet" else "loud")
        await turns.end(2)

    asyncio.run(scenario())


async def test_the_earliest_deadline_is_next() -> None:
    """Of one tenant; those without one of their own in order of arrival."""

    turns = _turns_of()
    await turns.come("holds", Ask("t", 10, 10))
    await turns.come("patient", Ask("t", 10, 10), in_s=50.0)
    await turns.come("hasty", Ask("t", 10, 10), in_s=40.0)
    await turns.end(3)
    assert turns.order == ["holds", "hasty", "patient"]


@pytest.mark.parametrize(
    ("header", "want"),
    [
        pytest.param(None, Rank.INTERACTIVE, id="nothing is said"),
        pytest.param(b"batch", Rank.BATCH, id="batch"),
        pytest.param(b"Standard", Rank.STANDARD, id="in any case"),
        pytest.param(b"interactive", Rank.INTERACTIVE, id="the highest"),
        pytest.param(b"urgent", None, id="more than the highest"),
        pytest.param(b"\xff", None, id="no text"),
        pytest.param(b"", None, id="empty"),
    ],
)
def test_read_rank(header: bytes | None, want: Rank | None) -> None:
    """The header, or a refusal that names it."""
    if want is not None:
        assert read_rank(header) is want
        return
    with pytest.raises(Refused, match="x-kelvin-priority") as refused:
        read_rank(header)
    assert isinstance(refused.value.failure, InvalidRequest)


@pytest.mark.parametrize(
    ("header", "highest", "want"),
    [
        pytest.param(None, "standard", Rank.STANDARD, id="the tenant's is the default"),
        pytest.param(b"interactive", "standard", Rank.STANDARD, id="nobody raises itself"),
        pytest.param(b"interactive", "batch", Rank.BATCH, id="not even from the lowest"),
        pytest.param(b"batch", "standard", Rank.BATCH, id="it may be lower"),
        pytest.param(b"standard", "interactive", Rank.STANDARD, id="also of the highest"),
    ],
)
def test_nobody_is_above_the_tenants_highest(header: bytes | None, highest: Priority, want: Rank) -> None:
    """A request can only lower itself."""
    assert read_rank(header, highest) is want


def _given(throttler: Throttler, tenant: str) -> float:
    return throttler._lines[KEY].waiting._lanes[Rank.INTERACTIVE].given.of(tenant)


@pytest.mark.parametrize(
    "leaves_first", [pytest.param(True, id="before its turn"), pytest.param(False, id="in the moment of its turn")]
)
async def test_who_leaves_is_given_nothing(leaves_first: bool) -> None:
    """Its task is cancelled, and has not run yet, when the slot comes free; or just after."""

    turns, loop = _turns_of(), asyncio.get_running_loop()
    replica = await turns.throttler.acquire(KEY, ASK, Deadline(loop.time() + LATER_S))
    await turns.come("leaves", Ask("t", 10, 1000))
    if leaves_first:
        turns.tasks[0].cancel()
    turns.throttler.slots.release(KEY, replica, ASK, None)
    turns.tasks[0].cancel()
    await _turns()
    assert turns.order == []
    assert replica.running == 0
    assert _given(turns.throttler, "t") <= 1


async def test_who_is_refused_is_given_nothing() -> None:
    """A start that failed, while another replica of the version ends."""

    turns = _turns_of()
    turns.throttler.apply(_feed(replica_row("a", draining=True)))
    await turns.come("waits", Ask("t", 10, 1000))
    turns.throttler.apply(Feed(revision=1, failures=(FAILED,)))
    await _turns()
    assert isinstance(turns.tasks[0].exception(), Refused)
    assert _given(turns.throttler, "t") <= 1


async def until_queued(here: World, count: int) -> None:
    """Wait until so many wait."""
    connector = aiohttp.UnixConnector(path=str(here.data / "run" / "activator.sock"))
    async with asyncio.timeout(20), aiohttp.ClientSession(connector=connector) as own:
        while True:
            async with own.get("http://activator/metrics") as answer:
                if f'kelvin_requests_queued{{process="activator"}} {count}\n' in await answer.text():
                    return


async def _declined(call: Call) -> None:
    call.refuse(InvalidRequest("temperature", "9", "must be 2 or less"))


async def _cut(call: Call) -> None:
    call.cut()


@pytest.mark.parametrize(
    ("script", "status", "times"),
    [
        pytest.param(hello, 200, 3, id="they took five each"),
        pytest.param(_declined, 400, 3, id="they were refused by the replica"),
        pytest.param(_cut, 502, 1, marks=pytest.mark.deep, id="it was lost three times, and nobody asked for a while"),
    ],
)
async def test_priorities_by_what_they_took(tmp_path: Path, script: Script, status: int, times: int) -> None:
    """From outside. Three interactive attempts might have taken a thousand tokens each; a batch holds the slot; a batch
    waits, and then an interactive one, which is next. First come first served it would not be, nor if estimates stood:
    a sixteenth of three thousand is more than the batch was given.
    """

    held = asyncio.Event()

    async def hold(call: Call) -> None:
        await held.wait()
        await hello(call)

    async with world(tmp_path, breaker_s=1) as here:
        replica = await here.replica("a", script, max_streams=1)

        async def holding() -> asyncio.Task[Got]:
            while True:
                sent = send("holds", "batch", 1)
                arrived = asyncio.create_task(replica.until(lambda r: len(r.calls) == 4))
                await asyncio.wait((sent, arrived), return_when=asyncio.FIRST_COMPLETED)
                if arrived.done():
                    return sent
                arrived.cancel()
                assert sent.result().code == "breaker_open"

        def send(name: str, priority: str, max_tokens: int) -> asyncio.Task[Got]:
            body = CHAT | {"user": name, "max_tokens": max_tokens}
            return asyncio.create_task(here.post(body=body, x_kelvin_priority=priority))

        for _ in range(times):
            assert (await send("before", "interactive", 1000)).status == status
        assert len(replica.calls) == 3
        replica.script = hold
        sent = [await holding()]
        for count, (name, priority) in enumerate((("batch", "batch"), ("interactive", "interactive")), 1):
            sent.append(send(name, priority, 1))
            await until_queued(here, count)
        held.set()
        assert [got.status for got in await asyncio.gather(*sent)] == [200, 200, 200]
        assert [call.wanted["user"] for call in replica.calls[3:]] == ["holds", "interactive", "batch"]
        got = await here.post(x_kelvin_priority="urgent")
        assert (got.status, got.code) == (400, "invalid_request")
