"""A late request runs at two replicas. The answer that begins first is used; the other replica is cancelled and records
its own work.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from activator.queue.policy.circuit_breaker import BreakerState
from activator.queue.throttler import Throttler
from activator.queue.version_queue import Replica
from activator.request.hedge_policy import HedgeLimits
from activator.request.retry_policy import RetryLimits
from kelvin.contracts.artifact_errors import WeightsDamaged
from kelvin.contracts.errors import InvalidRequest, Refused, Unavailable
from kelvin.contracts.serving.stream_frames import FrameKind, NoCredit
from tests.activator.control import replica_row
from tests.activator.replica import DONE, FakeReplica, Held, ReceivedRequest, Script, chunk, cut, decline, refuses
from tests.activator.request.hedge_world import HEDGE_AT_ONCE, HedgeWorld, SentRequest, ground, outcome

OK = None

full = refuses(NoCredit(8, 8))
bad = refuses(InvalidRequest("n", "2", "must be 1"))


async def beat(call: ReceivedRequest) -> None:
    """Send a 200 and a heartbeat: the request is counted, but has no token."""
    await call.write(FrameKind.HEARTBEAT)


async def damaged(call: ReceivedRequest) -> None:
    await call.fail(WeightsDamaged("v"))


def says(name: str) -> Script:
    """Return a script whose answer repeats the name of its replica."""

    async def script(call: ReceivedRequest) -> None:
        for tokens, text in enumerate((name, name, name), 1):
            await call.data(chunk(text), tokens)
            await asyncio.sleep(0)
        await call.data(DONE, 3)
        await call.end(3)

    return script


def answering_replicas(request: SentRequest) -> str:
    """Return the replica names in the received answer, in order."""
    lines = request.ear.heard.split(b"\n\n")
    found = [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
    return "".join(each["choices"][0]["delta"]["content"] for each in found)


async def late(here: HedgeWorld, first: Script, second: Script) -> tuple[SentRequest, FakeReplica, FakeReplica]:
    """Return a request that was late at `a`, the first choice of all, and was sent to `b` too."""
    at_a, at_b = await here.replica("a"), await here.replica("b")
    await here.warm_up()
    at_a.script, at_b.script = first, second
    request = here.ask()
    await at_b.until(lambda replica: any(call.request_id == request.name for call in replica.calls))
    return request, at_a, at_b


@pytest.mark.parametrize("first", [pytest.param(None, id="nothing sent"), pytest.param(beat, id="heartbeats")])
async def test_second_attempt_wins_when_it_starts_first(tmp_path: Path, first: Script | None) -> None:
    """The client gets the second answer only. The first attempt is cancelled before it ends, and its slot is free."""

    async with ground(tmp_path) as here:
        request, at_a, at_b = await late(here, Held(says("a"), first), says("b"))
        assert await outcome(request) is OK
        assert answering_replicas(request) == "bbb"
        assert request.call.account.runtime_id == "b"
        assert (request.call.account.hedge_winner, here.hedge_outcomes()) == ("second", {"second": 1})
        assert request.call.upstream is not None
        request.call.upstream.report_recorded()
        await at_b.until(lambda replica: replica.recorded == [request.name])
        await at_a.until(lambda replica: replica.answered_elsewhere == [request.name])
        assert not at_a.recorded


@pytest.mark.parametrize("second", [pytest.param(None, id="nothing sent"), pytest.param(beat, id="heartbeats")])
async def test_first_attempt_wins_when_it_starts_first(tmp_path: Path, second: Script | None) -> None:
    async with ground(tmp_path) as here:
        request, _, at_b = await late(here, first := Held(says("a")), Held(says("b"), second))
        first.release()
        assert await outcome(request) is OK
        assert answering_replicas(request) == "aaa"
        assert (request.call.account.runtime_id, here.hedge_outcomes()) == ("a", {"first": 1})
        await at_b.until(lambda replica: replica.answered_elsewhere == [request.name])


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(decline, id="it drains"),
        pytest.param(full, id="it is full"),
        pytest.param(bad, id="it rejects the request"),
        pytest.param(cut, id="it is lost"),
        pytest.param(damaged, id="its weights are damaged"),
    ],
)
async def test_failed_second_attempt_is_ignored(tmp_path: Path, second: Script) -> None:
    """The first attempt continues as if there had been no other."""

    async with ground(tmp_path) as here:
        request, _, at_b = await late(here, first := Held(says("a")), second)
        await at_b.until(lambda replica: replica.running == 0)
        first.release()
        assert await outcome(request) is OK
        assert (answering_replicas(request), here.hedge_outcomes()) == ("aaa", {"first": 1})


@pytest.mark.parametrize(
    ("first", "begun", "want"),
    [
        pytest.param(decline, None, "bbb", id="it drains"),
        pytest.param(full, None, "bbb", id="it is full"),
        pytest.param(cut, None, "bbb", id="it is lost before its head"),
        pytest.param(bad, None, "invalid_request", id="it rejects the request"),
        pytest.param(cut, beat, "replica_lost", id="it is lost once it has counted the request"),
    ],
)
async def test_failed_first_attempt_leaves_the_second(
    tmp_path: Path, first: Script, begun: Script | None, want: str
) -> None:
    """The second attempt's answer is used without a retry, unless the first failure is final."""

    async with ground(tmp_path) as here:
        other = Held(says("b"), beat)
        request, at_a, _ = await late(here, failing := Held(first, begun), other)
        failing.release()
        await at_a.until(lambda replica: replica.running == 0)
        if want == "bbb":
            other.release()
        refused = await outcome(request)
        if want == "bbb":
            assert (refused, answering_replicas(request), request.call.account.runtime_id) == (OK, want, "b")
            assert sum(len(replica.calls) for replica in here.replicas.values()) == 3
        else:
            assert isinstance(refused, Refused)
            assert (refused.failure.code, answering_replicas(request)) == (want, "")


async def test_request_is_retried_when_both_attempts_fail(tmp_path: Path) -> None:
    """The retry goes to another replica with the same request id. Neither failed replica keeps the request."""

    async with ground(tmp_path) as here:
        request, _, _ = await late(here, first := Held(decline), second := Held(decline))
        await here.replica("c", says("c"))
        second.release()
        first.release()
        assert await outcome(request) is OK
        assert answering_replicas(request) == "ccc"


async def test_request_waits_when_both_replicas_are_full(tmp_path: Path) -> None:
    """No retry is spent and no breaker opens. The request is sent again as soon as a replica has a stream."""

    async with ground(tmp_path, retries=RetryLimits(max_attempts=0)) as here:
        request, at_a, at_b = await late(here, first := Held(full), second := Held(full))
        at_a.script = at_b.script = full
        second.release()
        first.release()
        await at_a.until(lambda replica: len(at_a.calls) + len(at_b.calls) >= 6)
        at_b.script = says("b")
        assert await outcome(request) is OK
        assert answering_replicas(request) == "bbb"
        assert not here.throttler.replica_breakers.openings
        assert not here.counter_values("kelvin_retries_total")


async def test_client_disconnect_cancels_both_attempts(tmp_path: Path) -> None:
    """The first attempt is cancelled for the caller's record. The second records its own work."""

    async with ground(tmp_path) as here:
        request, at_a, at_b = await late(here, Held(first=beat), Held(first=beat))
        await at_a.until(lambda replica: replica.calls[-1].answer is not None)
        request.task.cancel()
        await asyncio.wait((request.task,))
        assert here.hedge_outcomes() == {"neither": 1}
        assert (at_a.deleted, at_a.answered_elsewhere) == ([request.name], [])
        await at_b.until(lambda replica: replica.answered_elsewhere == [request.name])


async def _busy(here: HedgeWorld) -> None:
    here.slots.feed(replica_row("b", 0))


async def _draining(here: HedgeWorld) -> None:
    here.slots.feed(replica_row("b", draining=True))


async def _resting(here: HedgeWorld) -> None:
    here.throttler.report_failed(here.slots.replica("b"))


async def _tried(here: HedgeWorld) -> None:
    await _resting(here)
    breaker = here.slots.replica("b").breaker
    assert breaker is not None
    assert breaker.state(time.monotonic() + 60.0) is BreakerState.HALF_OPEN


async def _gone(here: HedgeWorld) -> None:
    here.slots.feed(removed_replicas=("b",))


async def _nothing(here: HedgeWorld) -> None:
    return


@pytest.mark.parametrize(
    ("change", "limits", "cold", "budget"),
    [
        pytest.param(_busy, HEDGE_AT_ONCE, False, True, id="the other one has no slot free"),
        pytest.param(_draining, HEDGE_AT_ONCE, False, True, id="it drains"),
        pytest.param(_resting, HEDGE_AT_ONCE, False, True, id="its breaker is open"),
        pytest.param(_tried, HEDGE_AT_ONCE, False, True, id="its breaker is half open"),
        pytest.param(_gone, HEDGE_AT_ONCE, False, True, id="it is gone"),
        pytest.param(_nothing, HedgeLimits(min_samples=2, shortest_late_s=0.0), False, True, id="too little is known"),
        pytest.param(_nothing, HedgeLimits(min_samples=1, shortest_late_s=30.0), False, True, id="it is not late"),
        pytest.param(_nothing, HEDGE_AT_ONCE, True, True, id="it waited for a start"),
        pytest.param(_nothing, HEDGE_AT_ONCE, False, False, id="the budget is spent"),
    ],
)
async def test_request_without_second_replica_is_not_hedged(
    tmp_path: Path, change: Callable[[HedgeWorld], Awaitable[None]], limits: HedgeLimits, cold: bool, budget: bool
) -> None:
    """However late it is, only one replica gets it. The tests above are the control."""

    retries = RetryLimits() if budget else RetryLimits(retries_per_request=0.0, retries_per_s=0.0)
    async with ground(tmp_path, limits, retries) as here:
        at_a, at_b = await here.replica("a"), await here.replica("b")
        await here.warm_up()
        await change(here)
        at_a.script = first = Held(says("a"))
        request = here.ask(cold=cold)
        await at_a.until(lambda replica: replica.running == 1)
        await asyncio.sleep(0.05)  # long enough for most hedges that should not happen
        while not (budget or here.hedge_outcomes()):
            await asyncio.sleep(0.001)
        assert len(at_b.calls) == 0
        first.release()
        assert await outcome(request) is OK
        assert here.hedge_outcomes() == ({} if budget else {"withheld": 1})


async def begun(call: ReceivedRequest) -> None:
    """Compute a token of an answer that is sent whole: the first byte is known, and the answer can be taken back."""
    await call.write(FrameKind.HEARTBEAT, tokens=1)


@pytest.mark.parametrize(
    ("first", "second", "winner", "reported"),
    [
        pytest.param(None, None, "neither", {"a": 1, "b": 1}, id="both, before either began"),
        pytest.param(None, begun, "second", {"b": 1}, id="the second, which had begun"),
        pytest.param(begun, None, "first", {"a": 1}, id="the first, which had begun"),
    ],
)
async def test_each_failed_replica_is_reported_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: Script | None,
    second: Script | None,
    winner: str,
    reported: dict[str, int],
) -> None:
    """Both replicas have damaged memory. The request is retried once at a third replica, with one retry and one late
    request counted.
    """
    counted: Counter[str] = Counter()
    report_failed = Throttler.report_failed

    def counting(self: Throttler, replica: Replica, code: str) -> None:
        counted[replica.row.runtime_id] += 1
        report_failed(self, replica, code)

    monkeypatch.setattr(Throttler, "report_failed", counting)

    async with ground(tmp_path) as here:
        begins = asyncio.Event()

        async def at_first(call: ReceivedRequest) -> None:
            await begins.wait()
            if first is not None:
                await first(call)

        request, _, _ = await late(here, one := Held(damaged, at_first), other := Held(damaged, second))
        here.attempts._hedges = None  # the retry must not be hedged
        await here.replica("c", says("c"))
        begins.set()
        async with asyncio.timeout(30):
            while winner != "neither" and here.hedge_outcomes() != {winner: 1}:
                await asyncio.sleep(0.001)
        gone = tuple({"a", "b"} - reported.keys())  # otherwise the retry could go to the attempt that lost
        here.slots.feed(removed_replicas=gone)
        other.release()
        one.release()
        assert await outcome(request) is OK
        assert answering_replicas(request) == "ccc"
        assert (dict(counted), here.hedge_outcomes()) == (reported, {winner: 1})
        retries = {labels[-2:]: count for labels, count in here.counter_values("kelvin_retries_total").items()}
        assert retries == {("weights_damaged", "again"): 1}


# Clients leave at any moment, whatever replicas do.

REQUESTS = 150
AT_A_TIME = 10
HALF = HedgeLimits(min_samples=1, percentile=0.5, shortest_late_s=0.0)  # half of all requests are late
FREE = RetryLimits(retries_per_s=1e6)  # retry budgets have their own tests


def erratic(name: str, chance: random.Random) -> Script:
    """A replica that takes its time over each step, and breaks or refuses at any of them."""
    whole = says(name)

    async def moment() -> None:
        await asyncio.sleep(chance.choice((0, 0, 0.001, 0.004, 0.012)) * chance.random())

    async def script(call: ReceivedRequest) -> None:
        # one replica always serves, so that no request waits for a start
        fate = chance.random() if name != "d" else 0.5
        await moment()
        if fate < 0.1:
            call.refuse(Unavailable("this replica"))
            return
        if fate < 0.2:
            call.cut()
            return
        if fate < 0.6:
            await call.write(FrameKind.HEARTBEAT)
            await moment()
            if fate < 0.25:
                call.cut()
                return
        await whole(call)

    return script


async def _one(here: HedgeWorld, chance: random.Random) -> tuple[SentRequest, str]:
    """Send a request. Return it and its outcome."""
    request = here.ask()
    if chance.random() < 0.4:
        await asyncio.sleep(chance.random() * 0.02)
        request.task.cancel()
    await asyncio.wait((request.task,))
    if request.task.cancelled():
        return request, "left"
    refused = await outcome(request)
    if refused is None:
        return request, "answered"
    assert isinstance(refused, Refused), refused
    return request, refused.failure.code


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_left_of_requests_that_come_and_go(tmp_path: Path, seed: int) -> None:
    """Each answer comes whole from one replica, and its account names that replica. `ground` checks what is left."""
    chance = random.Random(seed)

    async with ground(tmp_path, HALF, FREE, rest_s=0.001) as here:
        for name in "abcd":
            await here.replica(name, erratic(name, chance), max_streams=3)
        many = asyncio.Semaphore(AT_A_TIME)

        async def bounded() -> tuple[SentRequest, str]:
            async with many:
                return await _one(here, chance)

        ends = await asyncio.gather(*(bounded() for _ in range(REQUESTS)))
        assert {end for _, end in ends} <= {"left", "answered", "replica_lost", "unavailable"}
        for request, end in ends:
            if end == "answered":
                assert answering_replicas(request) == 3 * str(request.call.account.runtime_id)
        assert sum(end == "answered" for _, end in ends) > REQUESTS / 4
        assert here.hedge_outcomes(), "no request was late"
