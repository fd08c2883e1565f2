"""The lines of a burst are red where they should be: one served before the other, one out of turn, one lost."""

import pytest

from coldstart_bench.processes import Memory
from coldstart_bench.traffic.burst import EACH_BYTES, BurstFigures, Served, fairness, inversions, judge, served

SLOTS = 2
TENANTS = ("a", "b")
IN_ORDER = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def memory(grown: int) -> Memory:
    """That grew by so much."""
    return Memory(0, grown, grown, 0, grown, grown)


def both(ends: list[float], codes: dict[str, int] | None = None) -> list[Served]:
    """Of two tenants, of whom one had these answers."""
    wanted = len(IN_ORDER)
    return [
        served("a", wanted, IN_ORDER, 0, {}, SLOTS),
        served("b", wanted, ends, 0, codes or {}, SLOTS),
    ]


@pytest.mark.parametrize(
    ("ends", "apart", "want"),
    [
        pytest.param(IN_ORDER, 1, 0.0, id="in order"),
        pytest.param([2.0, 1.0], 1, 1.0, id="the other way round"),
        pytest.param([2.0, 1.0, 3.0], 2, 0.0, id="served at once, they have no order"),
        pytest.param([3.0, 1.0, 2.0], 2, 1.0, id="but two that are farther apart have"),
        pytest.param([1.0], 1, None, id="one has no order"),
    ],
)
def test_inversions(ends: list[float], apart: int, want: float | None) -> None:
    """Of pairs that could have waited for one another."""
    assert inversions(ends, apart) == want


def test_fairness() -> None:
    """In turn, one tenant has the first half for itself; in fair order each has half of it."""
    fair = [(1.0, "a"), (1.1, "b"), (2.0, "a"), (2.1, "b")]
    in_turn = [(1.0, "a"), (1.1, "a"), (2.0, "b"), (2.1, "b")]
    assert fairness(fair, TENANTS) == 1.0
    assert fairness(in_turn, TENANTS) == 0.5
    assert fairness([], TENANTS) is None


@pytest.mark.parametrize(
    ("each", "fair", "grown", "starts", "want"),
    [
        pytest.param(both(IN_ORDER), 1.0, 0, 1, [], id="all holds"),
        pytest.param(both(IN_ORDER[:-1], {"overloaded": 1}), 1.0, 0, 1, ["requests that were not"], id="one is lost"),
        pytest.param(both(IN_ORDER), 0.5, 0, 1, ["fairness between"], id="one tenant first"),
        pytest.param(both(IN_ORDER[::-1]), 1.0, 0, 1, ["pairs of a tenant"], id="the last first"),
        pytest.param(both(IN_ORDER), 1.0, 12 * EACH_BYTES + 12, 1, ["bytes of the activator"], id="too much memory"),
        pytest.param(both(IN_ORDER), 1.0, 0, 2, ["starts of the model"], id="started twice"),
        pytest.param(both(IN_ORDER), 1.0, 0, 0, ["starts of the model"], id="it was not at zero"),
    ],
)
def test_what_is_red(each: list[Served], fair: float, grown: int, starts: int, want: list[str]) -> None:
    """That line and no other."""
    figures = BurstFigures(tuple(each), fair, None, memory(grown), starts)
    found = [one.claim for one in judge(figures) if one.passed is False]
    assert len(found) == len(want)
    assert all(claim.startswith(start) for claim, start in zip(found, want, strict=True))
