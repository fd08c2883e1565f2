"""Polls notice a change soon, end at their limit, and pause in between. On a fake clock."""

import pytest

from coldstart_bench.harness import polling
from coldstart_bench.harness.polling import MAX_POLL_S, POLL_S, poll_until_true, remaining


class Clock:
    """A fake of the module `time` whose `sleep` advances the clock."""

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
    monkeypatch.setattr(polling, "time", clock)
    return clock


def test_true_condition_returns_at_once(clock: Clock) -> None:
    """A true condition needs no pause, even with a limit of 0."""
    assert poll_until_true(lambda: True, 0.0)
    assert clock.pauses == []


@pytest.mark.parametrize(("limit_s", "want"), [(5.0, True), (2.0, False)])
def test_late_condition_is_seen_within_a_pause(clock: Clock, limit_s: float, want: bool) -> None:
    """A condition is seen within one pause, or the limit ends the poll."""
    assert poll_until_true(lambda: clock.now_s >= 103.0, limit_s) is want
    assert min(103.0, 100.0 + limit_s) <= clock.now_s < min(103.0, 100.0 + limit_s) + MAX_POLL_S


def test_poll_pauses_grow_to_a_limit(clock: Clock) -> None:
    """Pauses grow up to the caller's limit."""
    poll_until_true(lambda: False, 10.0, seldom_s=0.1)
    assert clock.pauses[0] == POLL_S
    assert clock.pauses == sorted(clock.pauses)
    assert clock.pauses[-1] == 0.1


def test_last_problem_is_returned(clock: Clock) -> None:
    """`remaining` returns the last problems, or [] once they are gone."""
    said = iter([["a", "b"], ["b"], []])
    assert remaining(lambda: next(said), 10.0) == []
    assert len(clock.pauses) == 2
    said = iter([["a", "b"], ["b"]])
    assert remaining(lambda: next(said), POLL_S) == ["b"]


def test_error_of_a_poll_is_raised(clock: Clock) -> None:
    def amiss() -> int:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        remaining(amiss, 10.0)
    assert clock.pauses == []
