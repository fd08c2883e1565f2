"""What comes late is seen soon after it came; what never comes is told when the time is up, and costs no core."""

import pytest

from coldstart_bench import patience
from coldstart_bench.patience import POLL_S, SELDOM_S, comes, remaining


class Clock:
    """As the module `time`; it goes on where somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(patience, "time", clock)
    return clock


def test_what_holds_at_once_is_not_waited_for(clock: Clock) -> None:
    """Nor is what has no time at all left unasked."""
    assert comes(lambda: True, 0.0)
    assert clock.pauses == []


@pytest.mark.parametrize(("limit_s", "want"), [(5.0, True), (2.0, False)])
def test_what_comes_after_three_seconds(clock: Clock, limit_s: float, want: bool) -> None:
    """Is seen within a pause of it, where so long is waited for it."""
    assert comes(lambda: clock.now_s >= 103.0, limit_s) is want
    assert min(103.0, 100.0 + limit_s) <= clock.now_s < min(103.0, 100.0 + limit_s) + SELDOM_S


def test_looks_are_more_and_more_seldom(clock: Clock) -> None:
    """Up to what the caller bears."""
    comes(lambda: False, 10.0, seldom_s=0.1)
    assert clock.pauses[0] == POLL_S
    assert clock.pauses == sorted(clock.pauses)
    assert clock.pauses[-1] == 0.1


def test_what_was_amiss_last_is_told(clock: Clock) -> None:
    """And nothing of it where it was mended meanwhile."""
    said = iter([["a", "b"], ["b"], []])
    assert remaining(lambda: next(said), 10.0) == []
    assert len(clock.pauses) == 2
    said = iter([["a", "b"], ["b"]])
    assert remaining(lambda: next(said), POLL_S) == ["b"]


def test_what_cannot_be_asked_ends_it(clock: Clock) -> None:
    """There and then."""

    def amiss() -> int:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        remaining(amiss, 10.0)
    assert clock.pauses == []
