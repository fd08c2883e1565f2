"""What is expected of pauses: a table; and of one version over time, as it is looked at each second."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.recurrence import (
    BURST_S,
    DOUBT,
    LEAST_ALIKE,
    MARGIN,
    Allowance,
    Counts,
    Expected,
    Unexpected,
    Watch,
    Why,
    expect,
    lead_s,
    worth,
)

HOUR = 3600.0
DAY = 24 * HOUR
LEAST = 60.0
LEAD = 10.0


@pytest.mark.parametrize(
    ("pauses", "longer_than_s", "want"),
    [
        pytest.param([], 0.0, Unexpected(Why.FEW), id="nothing is known"),
        pytest.param([100.0] * 2, 0.0, Unexpected(Why.FEW), id="twice may be chance"),
        pytest.param([100.0] * 3, 0.0, Expected(90.0, 110.0, 3, 3), id="three alike: a margin on both sides"),
        pytest.param([100.0, 150.0, 120.0], 0.0, Expected(90.0, 165.0, 3, 3), id="from the head to the tail"),
        pytest.param([100.0] * 3, 100.0, Unexpected(Why.FEW), id="none was longer than this one is"),
        pytest.param([10.0] * 9 + [HOUR] * 3, 0.0, Expected(9.0, 11.0, 9, 12), id="the short ones first"),
        pytest.param([10.0] * 9 + [HOUR] * 3, 60.0, Expected(3240.0, 3960.0, 3, 3), id="then the long ones"),
        pytest.param(
            [DAY] * 4 + [3 * DAY], 60.0, Expected(0.9 * DAY, 1.1 * DAY, 4, 5), id="a weekend among days is no day"
        ),
        pytest.param([DAY] * 4 + [3 * DAY], 1.2 * DAY, Unexpected(Why.FEW), id="on the weekend nobody is expected"),
        pytest.param(
            [70.0, 300.0, 1000.0, 5000.0, 20_000.0], 60.0, Unexpected(Why.SCATTERED, 70.0), id="of all lengths"
        ),
        pytest.param(
            [70.0] + [DAY] * 8, 60.0, Unexpected(Why.SCATTERED, 70.0), id="one that is short hides the rest for a while"
        ),
    ],
)
def test_expect(pauses: list[float], longer_than_s: float, want: Expected | Unexpected) -> None:
    found = expect(pauses, longer_than_s)
    if isinstance(want, Expected) and isinstance(found, Expected):
        assert (found.opens_s, found.closes_s) == pytest.approx((want.opens_s, want.closes_s))
        assert (found.alike, found.of) == (want.alike, want.of)
    else:
        assert found == want


@given(st.lists(st.floats(2.0, 1e6), max_size=64), st.floats(0.0, 1e6))
def test_what_is_always_so(pauses: list[float], longer_than_s: float) -> None:
    """A window is after now but for its margin, has most of the pauses that are left, and is worth less than a use."""
    found = expect(pauses, longer_than_s)
    if isinstance(found, Expected):
        assert (1 - MARGIN) * longer_than_s <= found.opens_s < found.closes_s
        assert LEAST_ALIKE <= found.alike <= found.of <= len(pauses)
        assert 0 < worth(found, Counts()) <= DOUBT
    elif found.look_again_s is not None:
        assert found.look_again_s > longer_than_s, "looking again is looking at fewer"


@pytest.mark.parametrize(
    ("counts", "want"),
    [
        pytest.param(Counts(), 0.8, id="nothing is known of how right it is"),
        pytest.param(Counts(came=9), 0.8, id="always right"),
        pytest.param(Counts(missed=1), 0.4, id="wrong once"),
        pytest.param(Counts(came=3, early=7, missed=4), 0.4, id="what came earlier was no mistake"),
    ],
)
def test_worth(counts: Counts, want: float) -> None:
    assert worth(Expected(1.0, 2.0, 4, 5), counts) == pytest.approx(want * DOUBT)


def test_lead() -> None:
    """Twice what a restore takes, and a beat or two at least."""
    assert (lead_s(0.1), lead_s(10.0)) == (2.0, 20.0)


class Life:
    """A version that is used now and then, and watched each second."""

    def __init__(self, least_s: float = LEAST) -> None:
        self.watch = Watch(least_s)
        self.pauses: list[float] = []
        self.busy_s = self.now = 0.0
        self.acts: list[float] = []  # idle seconds at which something was due

    def pause(self, seconds: int, *, act: bool = True) -> None:
        """Nobody comes for so long; then somebody does."""
        for _ in range(seconds):
            self.now += 1
            if self.watch.look(self.pauses, self.busy_s, self.now, LEAD) is not None:
                self.acts.append(self.now - self.busy_s)
                if act:
                    self.watch.brought()
        self.pauses.append(self.now - self.busy_s)
        self.busy_s = self.now
        self.watch.look(self.pauses, self.busy_s, self.now, LEAD)


def test_a_version_that_recurs() -> None:
    """After three pauses of 200 s it is brought once each time, before the margin and the lead, and the call comes."""
    life = Life()
    for _ in range(5):
        life.pause(200)
    assert life.acts == [170.0] * 2
    assert life.watch.counts == Counts(came=2)


def test_one_that_comes_earlier_and_one_that_does_not_come() -> None:
    """Both are counted; after a window that passed in vain nothing is expected any more."""
    life = Life()
    for _ in range(3):
        life.pause(200)
    life.pause(100)
    assert life.watch.counts == Counts(early=1)
    life.acts.clear()
    life.pause(1000)
    assert life.watch.counts == Counts(early=1, missed=1)
    assert len(life.acts) == 1
    assert isinstance(life.watch.view, Unexpected | None)


def test_what_is_used_lately_needs_no_foresight() -> None:
    """Pauses shorter than the least are nothing to act upon: what was used so lately is there."""
    life = Life(least_s=300.0)
    for _ in range(6):
        life.pause(200)
    assert life.acts == []
    assert life.watch.counts == Counts()


def test_by_day_and_over_night() -> None:
    """Ten calls, five minutes apart, each day: expected after five minutes; once that has passed, next morning."""
    life = Life()
    for _ in range(4):
        for _ in range(9):
            life.pause(300)
        life.pause(8000)
    life.acts.clear()
    for _ in range(9):
        life.pause(300)
    life.pause(8000)
    assert [act for act in life.acts if act < 400] == [260.0] * 10
    assert [act for act in life.acts if act > 400] == [7190.0]
    assert life.watch.counts.missed >= 1, "at dusk the next five minutes pass in vain"


def test_what_could_not_be_done_is_due_again() -> None:
    """Where there is no allowance, or a process has it, it is asked again each time until the window closes."""
    life = Life()
    for _ in range(3):
        life.pause(200)
    life.pause(300, act=False)
    assert life.acts[:50] == [float(second) for second in range(170, 220)]
    assert life.acts[50:] in ([], [220.0]), "where the window ends is rounded"
    assert life.watch.counts == Counts()


def test_allowance() -> None:
    """A burst, then the rate; what was taken beyond is made up for first."""
    allowance = Allowance(10.0)
    assert allowance.try_take(int(10 * BURST_S) + 50, 0.0)
    assert not allowance.try_take(1, 5.0)
    assert allowance.try_take(1000, 5.2)
    assert not allowance.try_take(1, 100.0)
    assert allowance.try_take(1, 106.0)
    quiet = Allowance(10.0)
    assert quiet.try_take(1, 0.0)
    assert quiet.try_take(int(10 * BURST_S), 1e6)
    assert not quiet.try_take(1, 1e6), "what was not used long ago is not saved up"
