"""One timer for one request after another: it rings for the last one, at its time, and leaves nothing behind."""

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop

from activator.http.deadline_timer import TICK_S, DeadlineTimer

LOOPS = [
    pytest.param(asyncio.new_event_loop, id="asyncio's loop"),
    pytest.param(uvloop.new_event_loop, id="uvloop, whose timers are rounded"),
]


def _nothing() -> None:
    """What is not called, or might as well not be."""


async def _rung(set_for: DeadlineTimer, in_s: float) -> tuple[float, float]:
    """When it was to ring, and when it did."""
    rung = asyncio.get_running_loop().create_future()
    at_s = time.monotonic() + in_s
    set_for.set(at_s, lambda: rung.set_result(time.monotonic()))
    async with asyncio.timeout(30):
        return at_s, await rung


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("is_persistent", [True, False])
def test_timer_never_fires_early(loop: object, is_persistent: bool) -> None:
    """However the loop rounds; also behind a request whose time was longer, or shorter."""

    async def scenario() -> None:
        one = DeadlineTimer(is_persistent=is_persistent)
        for number in range(30):
            at_s, rung_s = await _rung(one, number * 0.00037)
            assert rung_s >= at_s
            one.set(time.monotonic() + (60.0 if number % 3 else 0.0), _nothing)
            one.clear(_nothing)
        one.close()
        assert repr(one) == "<DeadlineTimer set=False timed=False>"

    with asyncio.Runner(loop_factory=loop) as runner:  # type: ignore[arg-type]
        runner.run(scenario())


class Timed:
    """The loop's timers and the clock, by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.made: list[float] = []  # for when, each
        self.ended = 0
        self.ring: Callable[[], None] = lambda: None
        monkeypatch.setattr("activator.http.deadline_timer.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("activator.http.deadline_timer.asyncio.get_running_loop", lambda: self)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> "Timed":
        self.made.append(self.now_s + delay_s)
        self.ring = call
        return self

    def cancel(self) -> None:
        self.ended += 1


def test_requests_on_one_connection_share_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand that end in time make one, which looks once whether it is time; then it is set for who is there."""
    timed, rung = Timed(monkeypatch), []
    one = DeadlineTimer(is_persistent=True)
    for number in range(1000):
        timed.now_s = 100.0 + number / 1000
        one.set(timed.now_s + 60.0, _nothing)
        one.clear(_nothing)
    assert timed.made == [pytest.approx(160.0 + TICK_S)]
    one.set(170.0, lambda: rung.append("in time"))
    timed.now_s = timed.made[-1]
    timed.ring()
    assert not rung
    assert timed.made[1:] == [pytest.approx(170.0 + TICK_S)]
    timed.now_s = timed.made[-1]
    timed.ring()
    assert rung == ["in time"]
    assert timed.ended == 0


def test_earlier_deadline_replaces_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that would ring too late ends."""
    timed = Timed(monkeypatch)
    one = DeadlineTimer(is_persistent=True)
    one.set(160.0, _nothing)
    one.clear(_nothing)
    one.set(110.0, lambda: None)
    assert timed.made == [pytest.approx(160.0 + TICK_S), pytest.approx(110.0 + TICK_S)]
    assert timed.ended == 1


def test_extended_deadline_fires_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It rings no sooner than then, and never sooner than it would have; the next request has its own time."""
    timed, rung = Timed(monkeypatch), []
    one = DeadlineTimer(is_persistent=True)
    one.set(110.0, lambda: rung.append(timed.now_s))
    one.extend_to(120.0)
    one.extend_to(115.0)
    for at_s in (110.0, 120.0):
        assert not rung
        assert timed.made[-1] == pytest.approx(at_s + TICK_S)
        timed.now_s = timed.made[-1]
        timed.ring()
    assert len(rung) == 1
    one.extend_to(500.0)
    one.set(130.0, lambda: rung.append(timed.now_s))
    timed.now_s = timed.made[-1]
    timed.ring()
    assert rung[1:] == [pytest.approx(130.0 + TICK_S)]


@pytest.mark.parametrize(("is_persistent", "ended"), [(False, 1), (True, 0)])
def test_timer_of_a_request_ends_with_it(monkeypatch: pytest.MonkeyPatch, is_persistent: bool, ended: int) -> None:
    """A stream's, or a connection's that was lost: no timer is left where thousands come and go. The control goes on
    until its connection does.
    """
    timed = Timed(monkeypatch)
    one = DeadlineTimer(is_persistent=is_persistent)
    one.set(160.0, _nothing)
    one.clear(_nothing)
    assert timed.ended == ended
    one.close()
    assert timed.ended == 1


def test_a_lost_connections_last_request_keeps_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for the disk yet."""
    timed, rung = Timed(monkeypatch), []
    one = DeadlineTimer(is_persistent=True)
    one.set(160.0, lambda: rung.append(1))
    one.close()
    assert timed.ended == 0
    timed.now_s = timed.made[-1]
    timed.ring()
    assert rung == [1]
    one.clear(_nothing)
    assert repr(one) == "<DeadlineTimer set=False timed=False>"


@pytest.mark.parametrize("is_persistent", [False, True])
def test_clear_ignores_another_requests_callback(monkeypatch: pytest.MonkeyPatch, is_persistent: bool) -> None:
    """It was set for the next request by then: that one is called in its time, and can be cleared itself."""
    timed, rung = Timed(monkeypatch), []
    one = DeadlineTimer(is_persistent=is_persistent)
    for name in ("rings", "is cleared"):
        one.set(timed.now_s + 60.0, _nothing)

        def call(name: str = name) -> None:
            rung.append(name)

        one.set(timed.now_s + 30.0, call)
        one.clear(_nothing)
        if name == "is cleared":
            one.clear(call)
        timed.now_s = timed.made[-1]
        timed.ring()
    assert rung == ["rings"]
