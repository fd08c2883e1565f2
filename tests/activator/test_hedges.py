"""A late request at two replicas: the answer that begins first is heard, the other replica ends and records itself."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from activator.policy.breaker import State
from activator.policy.hedge import HedgeLimits
from activator.policy.retries import RetryLimits
from contracts.artifact_errors import WeightsDamaged
from contracts.control import Feed
from contracts.errors import InvalidRequest, Refused, Unavailable
from contracts.frames import FrameKind, NoCredit
from contracts.problem import code_of
from tests.activator.control import replica_row
from tests.activator.hedging import AT_ONCE, KEY, Asked, Ground, ground, outcome
from tests.activator.replica import DONE, Call, FakeReplica, Script, chunk, hello

OK = None


class Turn:
    """A script in two halves: what is said while the request is late, and what once it is told to go on."""

    def __init__(self, go_on: Script = hello, late: Script | None = None) -> None:
        self._go_on = go_on
        self._late = late
        self.gate = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        if self._late is not None:
            await self._late(call)
        await self.gate.wait()
        await self._go_on(call)


async def beat(call: Call) -> None:
    """A 200 and a heartbeat: the request is counted, and no token is there."""
    await call.write(FrameKind.BEAT)


async def cut(call: Call) -> None:
    call.cut()


async def decline(call: Call) -> None:
    call.refuse(Unavailable("this replica"))


async def full(call: Call) -> None:
    call.refuse(NoCredit(8, 8))


async def damaged(call: Call) -> None:
    await call.fail(WeightsDamaged("v"))


async def bad(call: Call) -> None:
    call.refuse(InvalidRequest("n", "2", "must be 1"))


def says(name: str) -> Script:
    """An answer that tells whose it is."""

    async def script(call: Call) -> None:
        for tokens, text in enumerate((name, name, name), 1):
            await call.data(chunk(text), tokens)
            await asyncio.sleep(0)
        await call.data(DONE, 3)
        await call.end(3)

    return script


def heard(asked: Asked) -> str:
    """Whose words, as often as they came."""
    lines = asked.ear.heard.split(b"\n\n")
    found = [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
    return "".join(each["choices"][0]["delta"]["content"] for each in found)


async def late(here: Ground, first: Script, second: Script) -> tuple[Asked, FakeReplica, FakeReplica]:
    """A request that was late at `a`, where all go first, and has been sent to `b` as well."""
    at_a, at_b = await here.replica("a"), await here.replica("b")
    await here.known()
    at_a.script, at_b.script = first, second
    asked = here.ask()
    await at_b.until(lambda replica: any(call.request_id == asked.name for call in replica.calls))
    return asked, at_a, at_b


@pytest.mark.parametrize("first", [pytest.param(None, id="not a word"), pytest.param(beat, id="heartbeats")])
async def test_the_second_is_heard_where_it_begins_first(tmp_path: Path, first: Script | None) -> None:
    """All of it and nothing else; the first is told, before it has ended, and frees its slot."""

    async with ground(tmp_path) as here:
        asked, at_a, at_b = await late(here, Turn(says("a"), first), says("b"))
        assert await outcome(asked) is OK
        assert heard(asked) == "bbb"
        assert asked.call.account.runtime_id == "b"
        assert (asked.call.account.hedged, here.came()) == ("second", {"second": 1})
        assert asked.call.upstream is not None
        asked.call.upstream.recorded()
        await at_b.until(lambda replica: replica.recorded == [asked.name])
        await at_a.until(lambda replica: replica.disowned == [asked.name])
        assert not at_a.recorded


@pytest.mark.parametrize("second", [pytest.param(None, id="not a word"), pytest.param(beat, id="heartbeats")])
async def test_the_first_is_heard_where_it_begins_first(tmp_path: Path, second: Script | None) -> None:
    """Late as it was."""

    async with ground(tmp_path) as here:
        asked, _, at_b = await late(here, first := Turn(says("a")), Turn(says("b"), second))
        first.gate.set()
        assert await outcome(asked) is OK
        assert heard(asked) == "aaa"
        assert (asked.call.account.runtime_id, here.came()) == ("a", {"first": 1})
        await at_b.until(lambda replica: replica.disowned == [asked.name])


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(decline, id="it drains"),
        pytest.param(full, id="it is full"),
        pytest.param(bad, id="it says what another replica may not say"),
        pytest.param(cut, id="it is lost"),
        pytest.param(damaged, id="its weights are damaged"),
    ],
)
async def test_a_second_that_fails_is_no_matter(tmp_path: Path, second: Script) -> None:
    """The first one is waited for, as if there had been no other."""

    async with ground(tmp_path) as here:
        asked, _, at_b = await late(here, first := Turn(says("a")), second)
        await at_b.until(lambda replica: replica.running == 0)
        first.gate.set()
        assert await outcome(asked) is OK
        assert (heard(asked), here.came()) == ("aaa", {"first": 1})


@pytest.mark.parametrize(
    ("first", "begun", "want"),
    [
        pytest.param(decline, None, "bbb", id="it drains"),
        pytest.param(full, None, "bbb", id="it is full"),
        pytest.param(cut, None, "bbb", id="it is lost before its head"),
        pytest.param(bad, None, "invalid_request", id="it says that the request is wrong"),
        pytest.param(cut, beat, "replica_lost", id="it is lost once it has counted the request"),
    ],
)
async def test_a_first_that_fails_leaves_it_to_the_second(
    tmp_path: Path, first: Script, begun: Script | None, want: str
) -> None:
    """Without a retry, which was paid for already; unless no other replica's record could make up for it."""

    async with ground(tmp_path) as here:
        other = Turn(says("b"), beat)
        asked, at_a, _ = await late(here, failing := Turn(first, begun), other)
        failing.gate.set()
        await at_a.until(lambda replica: replica.running == 0)
        if want == "bbb":
            other.gate.set()
        refused = await outcome(asked)
        if want == "bbb":
            assert (refused, heard(asked), asked.call.account.runtime_id) == (OK, want, "b")
            assert sum(len(replica.calls) for replica in here.replicas.values()) == 3
        else:
            assert isinstance(refused, Refused)
            assert (code_of(refused.failure), heard(asked)) == (want, "")


async def test_where_both_fail_it_is_sent_again(tmp_path: Path) -> None:
    """To whoever is there then, under its one name; neither of both remembers it."""

    async with ground(tmp_path) as here:
        asked, _, _ = await late(here, first := Turn(decline), second := Turn(decline, None))
        await here.replica("c", says("c"))
        second.gate.set()
        first.gate.set()
        assert await outcome(asked) is OK
        assert heard(asked) == "ccc"


async def test_where_both_are_full_it_waits(tmp_path: Path) -> None:
    """No retry is spent, neither replica rests, and it is sent again at once where there is a stream."""

    async with ground(tmp_path, retries=RetryLimits(tries=0)) as here:
        asked, at_a, at_b = await late(here, first := Turn(full), second := Turn(full))
        at_a.script = at_b.script = full
        second.gate.set()
        first.gate.set()
        await at_a.until(lambda replica: len(at_a.calls) + len(at_b.calls) >= 6)
        at_b.script = says("b")
        assert await outcome(asked) is OK
        assert heard(asked) == "bbb"
        assert here.throttler.resting.openings == 0
        (family,) = [each for each in here.page.families() if each.name == "kelvin_retries_total"]
        assert not family.values


async def test_whoever_leaves_ends_both(tmp_path: Path) -> None:
    """The first is cancelled for the caller's record, the second records itself."""

    async with ground(tmp_path) as here:
        asked, at_a, at_b = await late(here, Turn(late=beat), Turn(late=beat))
        await at_a.until(lambda replica: replica.calls[-1].answer is not None)
        asked.task.cancel()
        await asyncio.wait((asked.task,))
        assert here.came() == {"neither": 1}
        assert (at_a.deleted, at_a.disowned) == ([asked.name], [])
        await at_b.until(lambda replica: replica.disowned == [asked.name])


async def _busy(here: Ground) -> None:
    here.tell(replica_row("b", 0))


async def _draining(here: Ground) -> None:
    here.tell(replica_row("b", draining=True))


async def _resting(here: Ground) -> None:
    here.throttler.report_failed(here.throttler._lines[KEY].replicas["b"])


async def _tried(here: Ground) -> None:
    await _resting(here)
    breaker = here.throttler._lines[KEY].replicas["b"].breaker
    assert breaker is not None
    assert breaker.state(time.monotonic() + 60.0) is State.HALF_OPEN


async def _gone(here: Ground) -> None:
    here.throttler.apply(Feed(revision=2, full=False, removed_replicas=("b",)))


async def _nothing(here: Ground) -> None:
    return


@pytest.mark.parametrize(
    ("change", "limits", "cold", "budget"),
    [
        pytest.param(_busy, AT_ONCE, False, True, id="the other one has no slot free"),
        pytest.param(_draining, AT_ONCE, False, True, id="it drains"),
        pytest.param(_resting, AT_ONCE, False, True, id="it rests"),
        pytest.param(_tried, AT_ONCE, False, True, id="it has rested, and is to be tried by one at a time"),
        pytest.param(_gone, AT_ONCE, False, True, id="it is gone"),
        pytest.param(_nothing, HedgeLimits(samples=2, least_s=0.0), False, True, id="too little is known"),
        pytest.param(_nothing, HedgeLimits(samples=1, least_s=30.0), False, True, id="it is not late"),
        pytest.param(_nothing, AT_ONCE, True, True, id="it waited for a start"),
        pytest.param(_nothing, AT_ONCE, False, False, id="the budget is spent"),
    ],
)
async def test_who_is_sent_to_one_replica_only(
    tmp_path: Path, change: Callable[[Ground], Awaitable[None]], limits: HedgeLimits, cold: bool, budget: bool
) -> None:
    """However late. Its control is any test above: nothing is changed, and both are asked."""

    retries = RetryLimits() if budget else RetryLimits(share=0.0, per_s=0.0)
    async with ground(tmp_path, limits, retries) as here:
        at_a, at_b = await here.replica("a"), await here.replica("b")
        await here.known()
        await change(here)
        at_a.script = first = Turn(says("a"))
        asked = here.ask(cold=cold)
        await at_a.until(lambda replica: replica.running == 1)
        await asyncio.sleep(0.05)  # long enough for most that would be wrong
        while not (budget or here.came()):
            await asyncio.sleep(0.001)
        assert len(at_b.calls) == 0
        first.gate.set()
        assert await outcome(asked) is OK
        assert here.came() == ({} if budget else {"withheld": 1})
