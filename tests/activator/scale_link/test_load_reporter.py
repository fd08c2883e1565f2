"""When the decider is told what, in virtual time: by a post each, or by a connection that may be away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from activator.queue.waker import Waker
from activator.routing.policy.version_key import VersionKey
from activator.scale_link.load_reporter import LoadReporter
from kelvin.contracts.serving.control_messages import ConcurrencyStat

pytestmark = pytest.mark.virtual_time

M, N = VersionKey("t", "m", "v" * 64), VersionKey("t", "n", "w" * 64)
ALONE = "each telling stands for itself"
HEARD = "it hears all of a session"


class Decider:
    """Writes down at which second it was told what; away, it takes nothing."""

    def __init__(self, kind: str) -> None:
        self.told: list[tuple[float, str, float, int]] = []
        self.is_there = True
        self._kind = kind
        self._session = object()

    @property
    def session(self) -> object | None:
        return self._session if self.is_there and self._kind == HEARD else None

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        now = round(asyncio.get_running_loop().time(), 3)
        if self.is_there:
            self.told += [(now, stat.model, round(stat.concurrency, 3), stat.requests) for stat in stats]
        return self.is_there

    def restart(self) -> None:
        """Another connection; it remembers nothing."""
        self._session = object()


@asynccontextmanager
async def reporting(kind: str) -> AsyncIterator[tuple[Decider, LoadReporter, Waker]]:
    """From a quarter of a second on."""
    decider = Decider(kind)
    clock = asyncio.get_running_loop().time
    reporter = LoadReporter(decider, clock=clock)
    waker = Waker(reporter.send_wake, clock=clock)
    running = asyncio.create_task(reporter.run())
    try:
        await asyncio.sleep(0.25)
        yield decider, reporter, waker
    finally:
        await waker.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


both = pytest.mark.parametrize("kind", [ALONE, HEARD])


@both
async def test_a_request_at_a_ready_version(kind: str) -> None:
    """The first is told at once, then each second what the second was, less what was told; a zero, and no more."""
    async with reporting(kind) as (decider, reporter, _):
        reporter.begin_request(M, lambda key: False)
        await asyncio.sleep(1.0)
        reporter.begin_request(M, lambda key: False)
        await asyncio.sleep(1.25)
        reporter.end_request(M)
        reporter.end_request(M)
        await asyncio.sleep(10)
    assert decider.told == [
        (0.25, "m", 1.0, 1),
        (1.0, "m", 0.0, 0),
        (2.0, "m", 1.75, 1),
        (3.0, "m", 1.0, 0),
        (4.0, "m", 0.0, 0),
    ]


@both
async def test_the_next_request_after_the_zero_is_a_first_one(kind: str) -> None:
    """It was forgotten; so it is told at once again."""
    async with reporting(kind) as (decider, reporter, _):
        for _again in range(2):
            reporter.begin_request(M, lambda key: False)
            reporter.end_request(M)
            await asyncio.sleep(3)
    assert [each[:3] for each in decider.told] == [
        (0.25, "m", 1.0), (1.0, "m", 0.0), (2.0, "m", 0.0), (3.25, "m", 1.0), (4.0, "m", 0.0), (5.0, "m", 0.0),
    ]  # fmt: skip


async def test_connected_decider_gets_one_wake_call() -> None:
    """Reports of one second add where they are heard: while somebody waits there is one a second, and no other."""
    async with reporting(HEARD) as (decider, reporter, waker):
        reporter.begin_request(M, lambda key: True)
        waker.start_wake(M)
        await asyncio.sleep(4.5)
        waker.stop_wake(M)
        reporter.end_request(M)
        await asyncio.sleep(3)
    assert decider.told == [
        (0.25, "m", 1.0, 1), (1.0, "m", 0.0, 0), (2.0, "m", 1.0, 0), (3.0, "m", 1.0, 0), (4.0, "m", 1.0, 0),
        (5.0, "m", 0.75, 0), (6.0, "m", 0.0, 0),
    ]  # fmt: skip


async def test_control_posted_wake_calls_repeat() -> None:
    """Negative control of the last: a post each stands for itself, and is taken off the next."""
    async with reporting(ALONE) as (decider, reporter, waker):
        reporter.begin_request(M, lambda key: True)
        waker.start_wake(M)
        await asyncio.sleep(3)
    assert [each[:3] for each in decider.told] == [
        (0.25, "m", 1.0), (1.0, "m", 0.0), (2.0, "m", 1.0), (2.25, "m", 1.0), (3.0, "m", 0.0),
    ]  # fmt: skip


@both
async def test_wake_call_is_retried_until_taken(kind: str) -> None:
    """It is repeated ten times a second until it is taken; what could not be told is not told late, nor taken off."""
    async with reporting(kind) as (decider, reporter, waker):
        decider.is_there = False
        for _ in range(3):
            reporter.begin_request(M, lambda key: True)
        waker.start_wake(M)
        await asyncio.sleep(2.5)
        decider.is_there = True
        await asyncio.sleep(1.5)
    assert decider.told == [(pytest.approx(2.8, abs=0.06), "m", 1.0, 1), (3.0, "m", 2.0, 0), (4.0, "m", 3.0, 0)]


async def test_wake_call_is_repeated_in_a_new_session() -> None:
    """Another connection is another session: whoever waits is told of anew."""
    async with reporting(HEARD) as (decider, reporter, waker):
        reporter.begin_request(M, lambda key: True)
        waker.start_wake(M)
        await asyncio.sleep(1.5)
        decider.restart()
        await asyncio.sleep(1.4)
    assert [each[:3] for each in decider.told] == [
        (0.25, "m", 1.0), (1.0, "m", 0.0), (2.0, "m", 1.0), (2.25, "m", 1.0), (3.0, "m", 0.0),
    ]  # fmt: skip


async def test_each_poke_counts_the_request_that_waits() -> None:
    """A decider restarts after the first poke, and while reports are lost: the pokes that it hears say as much as the
    first. A report without a request may be about one that an earlier replica still serves.
    """
    async with reporting(ALONE) as (decider, reporter, waker):
        reporter.begin_request(M, lambda key: True)
        waker.start_wake(M)
        await asyncio.sleep(0.5)
        decider.is_there = False
        await asyncio.sleep(3.0)
        decider.is_there = True
        await asyncio.sleep(4.5)
    pokes = [each for each in decider.told if each[0] % 1 > 0]  # reports come with the full second
    assert len(pokes) >= 3
    assert [each[2:] for each in pokes] == [(1.0, 1)] * len(pokes)


class Slow(Decider):
    """Takes what it is told a while later."""

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        await asyncio.sleep(0.1)
        return await super().send(stats)


@pytest.mark.parametrize(("meanwhile", "want"), [
    pytest.param("it is cancelled", True, id="one that was cancelled is"),
    pytest.param("it is forgotten", True, id="so is one whose version was forgotten before it was taken"),
    pytest.param("nothing", False, id="the control: one that was taken is not"),
])  # fmt: skip
async def test_untaken_wake_call_is_repeated(meanwhile: str, want: bool) -> None:
    """A version is told of where its poke was taken, and not before: else who waits next would be heard by nobody."""
    decider = Slow(HEARD)
    reporter = LoadReporter(decider, clock=asyncio.get_running_loop().time)
    send_wake = asyncio.create_task(reporter.send_wake(M))
    await asyncio.sleep(0.05)
    if meanwhile == "it is cancelled":
        send_wake.cancel()
    elif meanwhile == "it is forgotten":
        assert [stat.concurrency for stat in reporter.take_reports()] == [0.0]
    await asyncio.gather(send_wake, return_exceptions=True)
    before = len(decider.told)
    assert await reporter.send_wake(M)
    assert (len(decider.told) > before) == want


async def test_a_first_request_that_nobody_heard_of_is_in_the_next_report() -> None:
    """The announcement was lost: nothing is taken off for it."""
    async with reporting(HEARD) as (decider, reporter, _):
        decider.is_there = False
        reporter.begin_request(M, lambda key: False)
        await asyncio.sleep(0.25)
        decider.is_there = True
        await asyncio.sleep(1.0)
    assert decider.told == [(1.0, "m", 1.0, 1)]


@pytest.mark.parametrize(("kind", "zeros"), [(HEARD, [1.0, 3.0]), (ALONE, [])])
async def test_who_could_not_wait_leaves_a_zero_behind(kind: str, zeros: list[float]) -> None:
    """Somebody wants it for three seconds, and nobody is inside: each poke ends with a zero where that is heard."""
    async with reporting(kind) as (decider, _, waker):
        waker.start_wake_for(M, 3.0)
        await asyncio.sleep(6)
    pokes = [(0.25, "m", 1.0, 1), (2.25, "m", 1.0, 1)]
    assert decider.told == sorted([*pokes, *((at_s, "m", 0.0, 0) for at_s in zeros)])


async def test_all_versions_share_one_report() -> None:
    """One telling a second, however many there are."""
    tellings: list[int] = []

    class Counting(Decider):
        async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
            tellings.append(len(stats))
            return True

    reporter = LoadReporter(Counting(HEARD), clock=asyncio.get_running_loop().time)
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(0.25)
    reporter.begin_request(M, lambda key: False)
    reporter.begin_request(N, lambda key: False)
    await asyncio.sleep(2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert tellings == [2, 2, 2]
