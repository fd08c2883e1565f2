"""FailedAuthLimiter: a burst of wrong keys is free, then each is held twice as long. Memory and delays are bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.http.failed_auth_policy import FailedAuthLimiter, FailedAuthLimits, Penalty, source_of

LIMITS = FailedAuthLimits(
    burst=3, leak_s=10.0, first_s=0.1, longest_s=1.0, max_excess=8, max_sources=4, max_held=3, max_held_per_source=2
)


@pytest.mark.parametrize(
    ("gaps_s", "want"),
    [
        pytest.param([0, 0, 0], None, id="the burst is free"),
        pytest.param([0, 0, 0, 0], Penalty(0.1, 20.0, True), id="the next failure is held"),
        pytest.param([0, 0, 0, 0, 0], Penalty(0.2, 30.0, False), id="the one after is held twice as long"),
        pytest.param([0] * 7, Penalty(0.8, 50.0, False), id="the time doubles with each failure"),
        pytest.param([0] * 30, Penalty(1.0, 90.0, False), id="the time has a limit"),
        pytest.param([0, 0, 0, 10], None, id="one failure leaks after leak_s"),
        pytest.param([0] * 30 + [80], Penalty(0.1, 20.0, True), id="a source recovers after the time it was told"),
        pytest.param([0] * 30 + [90], None, id="a source recovers fully"),
        pytest.param([20] * 100, None, id="a slow trickle costs nothing"),
    ],
)
def test_repeated_failures_double_the_hold_time(gaps_s: list[float], want: Penalty | None) -> None:
    """Return the penalty of the last failure, when failures arrive with these gaps."""
    guesses, now_s, penalty = FailedAuthLimiter(LIMITS), 0.0, None
    for gap_s in gaps_s:
        now_s += gap_s
        penalty = guesses.record_failure("a", now_s)
        guesses.check_integrity()
    assert penalty == want


def test_sources_are_penalized_independently() -> None:
    guesses = FailedAuthLimiter(LIMITS)
    for _ in range(10):
        guesses.record_failure("a", 0.0)
    assert guesses.record_failure("a", 0.0) is not None
    assert guesses.record_failure("b", 0.0) is None


def test_least_recent_source_is_forgotten() -> None:
    """Memory is bounded. A source that keeps failing is not forgotten."""
    guesses = FailedAuthLimiter(LIMITS)
    for _ in range(4):
        guesses.record_failure("loud", 0.0)
    for number in range(20):
        guesses.record_failure(f"other {number}", 0.0)
        assert guesses.record_failure("loud", 0.0) is not None
        guesses.check_integrity()


def test_places_for_held_answers_are_bounded() -> None:
    """Places are bounded per source and in total."""
    guesses = FailedAuthLimiter(LIMITS)
    assert [guesses.try_hold("a") for _ in range(3)] == [True, True, False]
    assert [guesses.try_hold("b"), guesses.try_hold("c")] == [True, False]
    guesses.release_hold("a")
    assert guesses.try_hold("c")
    guesses.check_integrity()


STEPS = st.lists(
    st.tuples(st.sampled_from(["fail", "hold", "go"]), st.sampled_from("abcdefg"), st.floats(0, 30)), max_size=80
)


@given(STEPS)
def test_bounds_hold_whatever_comes(steps: list[tuple[str, str, float]]) -> None:
    """Memory, places and delays stay bounded. A second failure at the same time is never held for less."""
    guesses, now_s, held = FailedAuthLimiter(LIMITS), 0.0, []
    for step, source, gap_s in steps:
        now_s += gap_s
        if step == "fail":
            first, second = guesses.record_failure(source, now_s), guesses.record_failure(source, now_s)
            assert (0.0 if first is None else first.hold_s) <= (0.0 if second is None else second.hold_s) <= 1.0
        elif step == "hold" and guesses.try_hold(source):
            held.append(source)
        elif step == "go" and held:
            guesses.release_hold(held.pop())
        guesses.check_integrity()
        assert guesses.total_held == len(held)


@pytest.mark.parametrize(
    ("address", "want"),
    [
        pytest.param("192.0.2.7", "192.0.2.7", id="IPv4 by itself"),
        pytest.param("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64", id="IPv6 by its subscriber's network"),
        pytest.param("2001:db8:1:2::99", "2001:db8:1:2::/64", id="another address of the same network"),
        pytest.param("::ffff:192.0.2.7", "192.0.2.7", id="IPv4 in IPv6"),
        pytest.param("fe80::1%eth0", "fe80::/64", id="an address with a zone"),
        pytest.param("", "", id="unknown"),
    ],
)
def test_ipv6_addresses_are_grouped_by_64_bits(address: str, want: str) -> None:
    assert source_of(address) == want
