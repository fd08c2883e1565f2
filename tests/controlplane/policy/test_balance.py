"""What is lost, double or unaccounted for is found, named, and never more than that."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.balance import (
    Kind,
    LifetimeFacts,
    Range,
    add_to_ranges,
    covers,
    holes,
    lifetime_problems,
    tolerance_us,
)

GOOD = LifetimeFacts(
    runtime_id="rt-1",
    total_us=60_000_000,
    standby_us=10_000_000,
    restore_us=1_000_000,
    active_us=19_000_000,
    idle_us=30_000_000,
    requests=3,
    recorded_requests=3,
    answered_requests=3,
    recorded_device_us=18_000_000,
)


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        pytest.param(GOOD, [], id="all agrees"),
        pytest.param(replace(GOOD, idle_us=30_600_000), [], id="one percent over"),
        pytest.param(replace(GOOD, idle_us=29_400_000), [], id="one percent short"),
        pytest.param(replace(GOOD, idle_us=30_600_001), [Kind.TIME_UNACCOUNTED], id="more than one percent over"),
        pytest.param(replace(GOOD, idle_us=29_399_999), [Kind.TIME_UNACCOUNTED], id="more than one percent short"),
        pytest.param(replace(GOOD, recorded_device_us=19_600_000), [], id="requests used all of the active time"),
        pytest.param(
            replace(GOOD, recorded_device_us=19_600_001), [Kind.DEVICE_TIME_OVER], id="they used more than that"
        ),
        pytest.param(replace(GOOD, recorded_requests=2), [Kind.REQUESTS_MISSING], id="a request record is missing"),
        pytest.param(
            replace(GOOD, recorded_requests=4, answered_requests=4), [Kind.REQUESTS_EXTRA], id="one answer too many"
        ),
        pytest.param(replace(GOOD, recorded_requests=4), [], id="one whose caller left before the replica saw it"),
        pytest.param(
            replace(GOOD, is_cut=True, recorded_requests=9, answered_requests=9, recorded_device_us=60_000_000),
            [],
            id="what came after the last word of a life that was cut off",
        ),
        pytest.param(
            replace(GOOD, is_cut=True, recorded_requests=2), [Kind.REQUESTS_MISSING], id="one of before it is missing"
        ),
        pytest.param(
            replace(GOOD, recorded_requests=0, total_us=1),
            [Kind.TIME_UNACCOUNTED, Kind.REQUESTS_MISSING],
            id="two at once",
        ),
    ],
)
def test_lifetime_problems(facts: LifetimeFacts, want: list[Kind]) -> None:
    """The parts against the total, the requests against the runtime's count."""
    found = list(lifetime_problems(facts))
    assert [problem.kind for problem in found] == want
    assert all(problem.subject == "rt-1" for problem in found)


@pytest.mark.parametrize(
    ("total_us", "want"),
    [
        pytest.param(0, 100_000, id="100 ms at least"),
        pytest.param(10_000_000, 100_000, id="where both are the same"),
        pytest.param(60_000_000, 600_000, id="one percent of a long life"),
    ],
)
def test_tolerance(total_us: int, want: int) -> None:
    """1 % or 100 ms."""
    assert tolerance_us(total_us) == want


@pytest.mark.parametrize(
    ("received", "want"),
    [
        pytest.param([], [], id="a source that sent nothing"),
        pytest.param([(1, 9)], [], id="all of it"),
        pytest.param([(2, 9)], ["record 1 of this source never arrived; record 2 did"], id="the first is lost"),
        pytest.param(
            [(1, 3), (7, 7), (9, 12)],
            [
                "records 4 to 6 of this source never arrived; record 7 did",
                "record 8 of this source never arrived; record 9 did",
            ],
            id="two holes",
        ),
    ],
)
def test_holes(received: list[Range], want: list[str]) -> None:
    """Each is named by its sequences."""
    found = list(holes("activator-1", received))
    assert [problem.detail for problem in found] == want
    assert {(problem.kind, problem.subject) for problem in found} <= {(Kind.SEQUENCE_HOLE, "activator-1")}


SEQUENCES = st.lists(st.integers(min_value=1, max_value=30), max_size=30)


@given(SEQUENCES, SEQUENCES)
def test_ranges_are_the_set_of_what_arrived(first: list[int], second: list[int]) -> None:
    """In two batches, in any order, with repeats: the normal form of the set."""
    ranges = add_to_ranges(add_to_ranges([], first), second)
    assert [number for low, high in ranges for number in range(low, high + 1)] == sorted({*first, *second})
    assert all(later[0] > earlier[1] + 1 for earlier, later in pairwise(ranges))
    assert all(covers(ranges, number) == (number in {*first, *second}) for number in range(32))


@given(st.sets(st.integers(min_value=1, max_value=30), min_size=1))
def test_every_lost_record_is_named(arrived: set[int]) -> None:
    """The holes are exactly what did not arrive before the last that did."""
    named: set[int] = set()
    for problem in holes("s", add_to_ranges([], arrived)):
        words = (
            problem.detail.split(" of this source")[0].removeprefix("records ").removeprefix("record ").split(" to ")
        )
        named |= set(range(int(words[0]), int(words[-1]) + 1))
    assert named == set(range(1, max(arrived))) - arrived
