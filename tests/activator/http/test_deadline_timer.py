"""DeadlineTimer: one timer for successive requests of a connection. It fires for the last deadline, never early, and
leaves nothing behind.
"""

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
    """A callback that must not be called, or may be."""


async def _fire(set_for: DeadlineTimer, in_s: float) -> tuple[float, float]:
    """Set the timer. Return when it should fire and when it did."""
    fired = asyncio.get_running_loop().create_future()
    at_s = time.monotonic() + in_s
    set_for.set(at_s, lambda: fired.set_result(time.monotonic()))
    async with asyncio.timeout(30):
        return at_s, await fired


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("is_persistent", [True, False])
def test_timer_never_fires_early(loop: object, is_persistent: bool) -> None:
    """The loop may round its timers. The timer may have had an earlier or a later deadline before."""

    async def scenario() -> None:
        one = DeadlineTimer(is_persistent=is_persistent)
        for number in range(30):
            at_s, fired_s = await _fire(one, number * 0.00037)
            assert fired_s >= at_s
            one.set(time.monotonic() + (60.0 if number % 3 else 0.0), _nothing)
            one.clear(_nothing)
        one.close()
        assert repr(one) == "<DeadlineTimer set=False timed=False>"

    with asyncio.Runner(loop_factory=loop) as runner:  # type: ignore[arg-type]
        runner.run(scenario())


class Timed:
    """A fake clock and fake loop timers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.made: list[float] = []  # times of the loop timers made
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
    """A thousand requests that end in time use one loop timer. When it fires, it is set for the current deadline."""
    timed, fired = Timed(monkeypatch), []
    one = DeadlineTimer(is_persistent=True)
    for number in range(1000):
        timed.now_s = 100.0 + number / 1000
        one.set(timed.now_s + 60.0, _nothing)
        one.clear(_nothing)
    assert timed.made == [pytest.approx(160.0 + TICK_S)]
    one.set(170.0, lambda: fired.append("in time"))
    timed.now_s = timed.made[-1]
    timed.ring()
    assert not fired
    assert timed.made[1:] == [pytest.approx(170.0 + TICK_S)]
    timed.now_s = timed.made[-1]
    timed.ring()
    assert fired == ["in time"]
    assert timed.ended == 0


def test_earlier_deadline_replaces_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(monkeypatch)
    one = DeadlineTimer(is_persistent=True)
    one.set(160.0, _nothing)
    one.clear(_nothing)
    one.set(110.0, lambda: None)
    assert timed.made == [pytest.approx(160.0 + TICK_S), pytest.approx(110.0 + TICK_S)]
    assert timed.ended == 1


def test_extended_deadline_fires_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer fires at the latest extension. The next request has its own deadline."""
    timed, fired = Timed(monkeypatch), []
    one = DeadlineTimer(is_persistent=True)
    one.set(110.0, lambda: fired.append(timed.now_s))
    one.extend_to(120.0)
    one.extend_to(115.0)
    for at_s in (110.0, 120.0):
        assert not fired
        assert timed.made[-1] == pytest.approx(at_s + TICK_S)
        timed.now_s = timed.made[-1]
        timed.ring()
    assert len(fired) == 1
    one.extend_to(500.0)
    one.set(130.0, lambda: fired.append(timed.now_s))
    timed.now_s = timed.made[-1]
    timed.ring()
    assert fired[1:] == [pytest.approx(130.0 + TICK_S)]


@pytest.mark.parametrize(("is_persistent", "ended"), [(False, 1), (True, 0)])
def test_timer_of_a_request_ends_with_it(monkeypatch: pytest.MonkeyPatch, is_persistent: bool, ended: int) -> None:
    """A stream's timer is cancelled with its request, so that thousands of streams leave none. Control: a persistent
    one lives as long as its connection.
    """
    timed = Timed(monkeypatch)
    one = DeadlineTimer(is_persistent=is_persistent)
    one.set(160.0, _nothing)
    one.clear(_nothing)
    assert timed.ended == ended
    one.close()
    assert timed.ended == 1


def test_last_request_of_a_lost_connection_keeps_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last request may still wait for the disk."""
    timed, fired = Timed(monkeypatch), []
    one = DeadlineTimer(is_persistent=True)
    one.set(160.0, lambda: fired.append(1))
    one.close()
    assert timed.ended == 0
    timed.now_s = timed.made[-1]
    timed.ring()
    assert fired == [1]
    one.clear(_nothing)
    assert repr(one) == "<DeadlineTimer set=False timed=False>"


@pytest.mark.parametrize("is_persistent", [False, True])
def test_clear_ignores_another_requests_callback(monkeypatch: pytest.MonkeyPatch, is_persistent: bool) -> None:
    """The timer was already set for the next request. Its callback is called in time, and can be cleared itself."""
    timed, fired = Timed(monkeypatch), []
    one = DeadlineTimer(is_persistent=is_persistent)
    for name in ("rings", "is cleared"):
        one.set(timed.now_s + 60.0, _nothing)

        def call(name: str = name) -> None:
            fired.append(name)

        one.set(timed.now_s + 30.0, call)
        one.clear(_nothing)
        if name == "is cleared":
            one.clear(call)
        timed.now_s = timed.made[-1]
        timed.ring()
    assert fired == ["rings"]
