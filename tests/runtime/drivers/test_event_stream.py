"""A request's events reach its response in order, once and bounded, and its end reaches the engine."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.errors import Failure, Internal, Refused
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.traffic_errors import Cancelled, DeadlineExceeded, Overloaded, SlowReader
from runtime.drivers import interface
from runtime.drivers.event_stream import SLOW_READER_S, EventStream, EventStreams
from runtime.drivers.interface import Event, Failed, Finished, Generated, GenerationRequest, Request, Sampling

REQUEST = GenerationRequest(request_id="r", prompt_ids=(1,), sampling=Sampling(max_tokens=9))


class Inbox:
    """A fake of the engine's thread."""

    def __init__(self, refusal: Failure | None = None) -> None:
        self.refusal = refusal
        self.submitted: list[str] = []
        self.cancelled: list[str] = []

    def submit(self, request: Request) -> None:
        if self.refusal is not None:
            raise Refused(self.refusal)
        self.submitted.append(request.request_id)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


class Clock:
    """A clock in seconds, set by the test."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _token(serial: str, number: int = 0) -> Event:
    return Generated(serial, number, Counts(1, 0, number, 0))


async def test_events_arrive_in_order_and_together() -> None:
    """Events that arrived between reads are taken at once."""
    stream = EventStream("s", lambda _: None)
    events = [_token("s", 1), _token("s", 2), Finished("s", "stop", Counts())]
    for event in events:
        stream.push(event)
    assert await stream.next_events(0) == events
    assert await stream.next_events(0) == []


async def test_a_reader_that_waits_is_woken() -> None:
    """An event or an abandonment wakes a waiting reader."""
    stream = EventStream("s", lambda _: None)
    reader = asyncio.create_task(stream.next_events(10))
    await asyncio.sleep(0)
    stream.push(_token("s"))
    assert await reader == [_token("s")]
    reader = asyncio.create_task(stream.next_events(10))
    await asyncio.sleep(0)
    stream.abandon(Internal())
    with pytest.raises(Refused):
        await reader


async def test_the_first_reason_to_abandon_stands() -> None:
    """The engine is told once, at once, and waiting events are dropped."""
    cancelled: list[str] = []

    stream = EventStream("s", cancelled.append)
    stream.push(_token("s"))
    stream.abandon(DeadlineExceeded(1.0, "generating"))
    stream.abandon(Cancelled())
    stream.push(_token("s"))
    with pytest.raises(Refused) as caught:
        await stream.next_events(0)
    assert caught.value.failure == DeadlineExceeded(1.0, "generating")
    assert cancelled == ["s"]


def test_an_ended_request_is_not_cancelled() -> None:
    cancelled: list[str] = []
    stream = EventStream("s", cancelled.append)
    stream.push(Finished("s", "length", Counts()))
    stream.stop()
    stream.abandon(Cancelled())
    assert cancelled == []


async def test_tokens_that_nobody_reads_are_bounded() -> None:
    """Above the limit the stream is abandoned, once the oldest event has waited too long.
    Its last event still marks the engine's release."""
    cancelled: list[str] = []
    clock = Clock()

    stream = EventStream("s", cancelled.append, max_tokens=3, now_s=clock)
    for number in range(3):
        stream.push(_token("s", number))
    clock.now_s += SLOW_READER_S
    reasons = [stream.abandon_failure]
    stream.push(_token("s", 3))
    assert [*reasons, stream.abandon_failure] == [None, SlowReader(3)]
    assert cancelled == ["s"]
    before = stream.is_released
    stream.push(interface.Cancelled("s", Counts()))
    assert (before, stream.is_released) == (False, True)


async def test_reader_without_a_processor_for_a_moment_is_not_slow() -> None:
    """A short pause makes no slow reader, however many tokens wait. Each read restarts its time."""
    clock = Clock()

    stream = EventStream("s", lambda _: None, max_tokens=3, now_s=clock)
    for _ in range(3):
        for number in range(100):
            stream.push(_token("s", number))
        clock.now_s += SLOW_READER_S - 0.1
        stream.push(_token("s", 100))
        assert len(await stream.next_events(0)) == 101


async def test_a_last_event_always_has_room() -> None:
    stream = EventStream("s", lambda _: None, max_tokens=1)
    stream.push(_token("s"))
    stream.push(Finished("s", "stop", Counts()))
    assert len(await stream.next_events(0)) == 2


async def test_refused_submit_opens_no_stream() -> None:
    inbox = Inbox(Overloaded("x", 1, 1.0))
    streams = EventStreams(inbox.submit, inbox.cancel)
    with pytest.raises(Refused):
        streams.open(REQUEST)
    assert len(streams) == 0
    streams.check_integrity()


async def test_the_same_request_twice_is_two_streams() -> None:
    inbox = Inbox()
    streams = EventStreams(inbox.submit, inbox.cancel)
    first, second = streams.open(REQUEST), streams.open(REQUEST)
    assert first.serial != second.serial
    streams.dispatch([_token(second.serial)])
    assert await first.next_events(0) == []
    assert await second.next_events(0) == [_token(second.serial)]


async def test_engine_failure_ends_every_stream() -> None:
    """Every stream fails, and the table is empty."""
    inbox = Inbox()
    streams = EventStreams(inbox.submit, inbox.cancel)
    stream = streams.open(REQUEST)
    streams.release_all(Internal())
    assert stream.abandon_failure == Internal()
    assert inbox.cancelled == [], "the engine has ended"
    assert len(streams) == 0


steps = st.lists(
    st.tuples(st.sampled_from(["open", "token", "finish", "fail", "abandon", "cancelled", "stray"]), st.integers(0, 5)),
    max_size=40,
)


@given(steps)
async def test_the_table_holds_what_the_engine_holds(actions: list[tuple[str, int]]) -> None:
    """After any sequence of events, a stream exists from `open` to the engine's last event."""
    inbox = Inbox()
    streams = EventStreams(inbox.submit, inbox.cancel, max_tokens=4)
    live: dict[str, EventStream] = {}
    for action, which in actions:
        serial = list(live)[which % len(live)] if live else "nobody"
        match action:
            case "open":
                stream = streams.open(REQUEST)
                live[stream.serial] = stream
            case "token":
                streams.dispatch([_token(serial)])
            case "finish":
                streams.dispatch([_token(serial), Finished(serial, "stop", Counts())])
                live.pop(serial, None)
            case "fail":
                streams.dispatch([Failed(serial, Internal(), Counts())])
                live.pop(serial, None)
            case "cancelled":
                streams.dispatch([interface.Cancelled(serial, Counts())])
                live.pop(serial, None)
            case "abandon" if live:
                live[serial].abandon(Cancelled())
                assert serial in inbox.cancelled
            case _:
                streams.dispatch([_token("a stranger")])
        streams.check_integrity()
        assert len(streams) == len(live)
