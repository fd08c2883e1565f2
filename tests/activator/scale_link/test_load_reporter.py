"""LoadReporter on virtual time: what an autoscaler gets and when, by posts or over a connection that may break."""

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
POSTED = "each telling stands for itself"
CONNECTED = "it hears all of a session"


class FakeAutoscaler:
    """An autoscaler that records each stat and its time. While `accepts` is False it accepts nothing."""

    def __init__(self, kind: str) -> None:
        self.received: list[tuple[float, str, float, int]] = []
        self.accepts = True
        self._kind = kind
        self._session = object()

    @property
    def session(self) -> object | None:
        return self._session if self.accepts and self._kind == CONNECTED else None

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        now = round(asyncio.get_running_loop().time(), 3)
        if self.accepts:
            self.received += [(now, stat.model, round(stat.concurrency, 3), stat.requests) for stat in stats]
        return self.accepts

    def restart(self) -> None:
        """Start a new session without the old one's stats."""
        self._session = object()


@asynccontextmanager
async def reporting(kind: str) -> AsyncIterator[tuple[FakeAutoscaler, LoadReporter, Waker]]:
    """Run a reporter and a waker. The block starts at 0.25 s."""
    autoscaler = FakeAutoscaler(kind)
    clock = asyncio.get_running_loop().time
    reporter = LoadReporter(autoscaler, clock=clock)
    waker = Waker(reporter.send_wake, clock=clock)
    running = asyncio.create_task(reporter.run())
    try:
        await asyncio.sleep(0.25)
        yield autoscaler, reporter, waker
    finally:
        await waker.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


both = pytest.mark.parametrize("kind", [POSTED, CONNECTED])


@both
async def test_request_is_announced_then_reported_each_second(kind: str) -> None:
    """The first request is announced at once. Then each second's concurrency is reported, less the announcement. After
    a zero nothing more is sent.
    """
    async with reporting(kind) as (autoscaler, reporter, _):
        reporter.begin_request(M, lambda key: False)
        await asyncio.sleep(1.0)
        reporter.begin_request(M, lambda key: False)
        await asyncio.sleep(1.25)
        reporter.end_request(M)
        reporter.end_request(M)
        await asyncio.sleep(10)
    assert autoscaler.received == [
        (0.25, "m", 1.0, 1),
        (1.0, "m", 0.0, 0),
        (2.0, "m", 1.75, 1),
        (3.0, "m", 1.0, 0),
        (4.0, "m", 0.0, 0),
    ]


@both
async def test_the_next_request_after_the_zero_is_a_first_one(kind: str) -> None:
    """After the zero the version is forgotten, so its next request is announced at once."""
    async with reporting(kind) as (autoscaler, reporter, _):
        for _again in range(2):
            reporter.begin_request(M, lambda key: False)
            reporter.end_request(M)
            await asyncio.sleep(3)
    assert [each[:3] for each in autoscaler.received] == [
        (0.25, "m", 1.0), (1.0, "m", 0.0), (2.0, "m", 0.0), (3.25, "m", 1.0), (4.0, "m", 0.0), (5.0, "m", 0.0),
    ]  # fmt: skip


async def test_connected_autoscaler_gets_one_wake_call() -> None:
    """A connected autoscaler adds up the reports of a second, so a waiting request is reported once per second."""
    async with reporting(CONNECTED) as (autoscaler, reporter, waker):
        reporter.begin_request(M, lambda key: True)
        waker.start_wake(M)
        await asyncio.sleep(4.5)
        waker.stop_wake(M)
        reporter.end_request(M)
        await asyncio.sleep(3)
    assert autoscaler.received == [
        (0.25, "m", 1.0, 1), (1.0, "m", 0.0, 0), (2.0, "m", 1.0, 0), (3.0, "m", 1.0, 0), (4.0, "m", 1.0, 0),
        (5.0, "m", 0.75, 0), (6.0, "m", 0.0, 0),
    ]  # fmt: skip


async def test_control_posted_wake_calls_repeat() -> None:
    """Negative control: each post stands alone and is subtracted from the next report."""
    async with reporting(POSTED) as (autoscaler, reporter, waker):
        reporter.begin_request(M, lambda key: True)
        waker.start_wake(M)
        await asyncio.sleep(3)
    assert [each[:3] for each in autoscaler.received] == [
        (0.25, "m", 1.0), (1.0, "m", 0.0), (2.0, "m", 1.0), (2.25, "m", 1.0), (3.0, "m", 0.0),
    ]  # fmt: skip


@both
async def test_wake_call_is_retried_until_taken(kind: str) -> None:
    """It is repeated ten times a second until it is accepted. A lost call is neither sent late nor subtracted."""
    async with reporting(kind) as (autoscaler, reporter, waker):
        autoscaler.accepts = False
        for _ in range(3):
            reporter.begin_request(M, lambda key: True)
        waker.start_wake(M)
        await asyncio.sleep(2.5)
        autoscaler.accepts = True
        await asyncio.sleep(1.5)
    assert autoscaler.received == [(pytest.approx(2.8, abs=0.06), "m", 1.0, 1), (3.0, "m", 2.0, 0), (4.0, "m", 3.0, 0)]


async def test_wake_call_is_repeated_in_a_new_session() -> None:
    """Another connection is a new session, and waiting requests are reported again."""
    async with reporting(CONNECTED) as (autoscaler, reporter, waker):
        reporter.begin_request(M, lambda key: True)
        waker.start_wake(M)
        await asyncio.sleep(1.5)
        autoscaler.restart()
        await asyncio.sleep(1.4)
    assert [each[:3] for each in autoscaler.received] == [
        (0.25, "m", 1.0), (1.0, "m", 0.0), (2.0, "m", 1.0), (2.25, "m", 1.0), (3.0, "m", 0.0),
    ]  # fmt: skip


async def test_each_wake_call_counts_the_waiting_request() -> None:
    """The autoscaler restarts after the first wake call, and reports are lost. Later wake calls count one request too,
    since a report without one may concern requests that an earlier replica serves.
    """
    async with reporting(POSTED) as (autoscaler, reporter, waker):
        reporter.begin_request(M, lambda key: True)
        waker.start_wake(M)
        await asyncio.sleep(0.5)
        autoscaler.accepts = False
        await asyncio.sleep(3.0)
        autoscaler.accepts = True
        await asyncio.sleep(4.5)
    announcements = [each for each in autoscaler.received if each[0] % 1 > 0]  # reports are sent at full seconds
    assert len(announcements) >= 3
    assert [each[2:] for each in announcements] == [(1.0, 1)] * len(announcements)


class SlowAutoscaler(FakeAutoscaler):
    """An autoscaler that accepts each stat after a delay."""

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        await asyncio.sleep(0.1)
        return await super().send(stats)


@pytest.mark.parametrize(("meanwhile", "want"), [
    pytest.param("it is cancelled", True, id="a cancelled call is repeated"),
    pytest.param("it is forgotten", True, id="a call whose version was forgotten is repeated"),
    pytest.param("nothing", False, id="control: an accepted call is not"),
])  # fmt: skip
async def test_untaken_wake_call_is_repeated(meanwhile: str, want: bool) -> None:
    """A version counts as announced once its wake call was accepted. Otherwise the next request is not reported."""
    autoscaler = SlowAutoscaler(CONNECTED)
    reporter = LoadReporter(autoscaler, clock=asyncio.get_running_loop().time)
    send_wake = asyncio.create_task(reporter.send_wake(M))
    await asyncio.sleep(0.05)
    if meanwhile == "it is cancelled":
        send_wake.cancel()
    elif meanwhile == "it is forgotten":
        assert [stat.concurrency for stat in reporter.take_reports()] == [0.0]
    await asyncio.gather(send_wake, return_exceptions=True)
    before = len(autoscaler.received)
    assert await reporter.send_wake(M)
    assert (len(autoscaler.received) > before) == want


async def test_unheard_first_request_is_in_the_next_report() -> None:
    """The announcement was lost, so nothing is subtracted for it."""
    async with reporting(CONNECTED) as (autoscaler, reporter, _):
        autoscaler.accepts = False
        reporter.begin_request(M, lambda key: False)
        await asyncio.sleep(0.25)
        autoscaler.accepts = True
        await asyncio.sleep(1.0)
    assert autoscaler.received == [(1.0, "m", 1.0, 1)]


@pytest.mark.parametrize(("kind", "zeros"), [(CONNECTED, [1.0, 3.0]), (POSTED, [])])
async def test_timed_wake_call_is_followed_by_a_zero(kind: str, zeros: list[float]) -> None:
    """A request could not wait, and wants the version for three seconds. Over a connection each wake call is followed
    by a zero.
    """
    async with reporting(kind) as (autoscaler, _, waker):
        waker.start_wake_for(M, 3.0)
        await asyncio.sleep(6)
    announcements = [(0.25, "m", 1.0, 1), (2.25, "m", 1.0, 1)]
    assert autoscaler.received == sorted([*announcements, *((at_s, "m", 0.0, 0) for at_s in zeros)])


async def test_all_versions_share_one_report() -> None:
    """There is one report per second for any number of versions."""
    tellings: list[int] = []

    class Counting(FakeAutoscaler):
        async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
            tellings.append(len(stats))
            return True

    reporter = LoadReporter(Counting(CONNECTED), clock=asyncio.get_running_loop().time)
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(0.25)
    reporter.begin_request(M, lambda key: False)
    reporter.begin_request(N, lambda key: False)
    await asyncio.sleep(2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert tellings == [2, 2, 2]
