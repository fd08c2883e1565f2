"""A replica's streams are shared max-min fair among activators, within the limit, and none starves."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.lifecycle.credit_policy import CLAIM_TTL_S, DEMAND_TTL_S, ROTATION_S, Credits, fair_share


@pytest.mark.parametrize(
    ("streams", "wants", "want"),
    [
        pytest.param(8, [3], [3], id="one that wants little has it"),
        pytest.param(8, [9], [8], id="one that wants more than all has all"),
        pytest.param(8, [8, 8], [4, 4], id="two that want all have half"),
        pytest.param(8, [1, 8], [1, 7], id="what one does not want is the other's"),
        pytest.param(8, [1, 6, 9], [1, 4, 3], id="what does not divide is the first one's"),
        pytest.param(2, [5, 5, 5], [1, 1, 0], id="more activators than streams"),
        pytest.param(8, [0, 8], [0, 8], id="one that wants nothing"),
    ],
)
def test_fair_share(streams: int, wants: list[int], want: list[int]) -> None:
    assert [fair_share(streams, wants, index, 0) for index in range(len(wants))] == want


@given(st.integers(1, 40), st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 20))
def test_parts_are_max_min_fair(streams: int, wants: list[int], turn: int) -> None:
    """Parts sum to the demand or the streams, differ by at most one below demand, and even out over the rotations."""
    parts = [fair_share(streams, wants, index, turn) for index in range(len(wants))]
    assert sum(parts) == min(streams, sum(wants))
    for part, wanted in zip(parts, wants, strict=True):
        assert part <= wanted
        assert part == wanted or part >= max(parts) - 1
    short = [index for index, part in enumerate(parts) if part < wants[index]]
    if short:
        equal = [index for index in range(len(wants)) if wants[index] > min(parts[index] for index in short)]
        sums = {sum(fair_share(streams, wants, index, turn + more) for more in range(len(equal))) for index in equal}
        assert len(sums) == 1


def enter(credits: Credits, names: Sequence[str], now_s: float = 0.0, wants: int = 100) -> list[bool]:
    """Let one request per name enter, in this order."""
    return [credits.try_enter(name, wants, now_s) for name in names]


def test_only_activator_gets_all_streams() -> None:
    """The only activator gets all streams, and no more."""
    credits = Credits(4)
    assert enter(credits, "aaaaa") == [True] * 4 + [False]
    assert credits.credit_of("a", 0.0) == 4
    credits.leave("a")
    assert enter(credits, "a") == [True]


def test_credit_leaves_what_others_want() -> None:
    """An activator's credit leaves the last demand of others for a while, then what they have inside."""
    credits = Credits(8)
    enter(credits, "a", wants=1)
    enter(credits, "b", wants=3)
    assert credits.credit_of("a", 0.0) == 5
    assert credits.credit_of("b", 0.0) == 7
    assert credits.credit_of("a", DEMAND_TTL_S) == 7, "one is inside"
    credits.leave("b")
    enter(credits, "a", DEMAND_TTL_S, wants=1)
    assert credits.credit_of("a", DEMAND_TTL_S) == 8


@pytest.mark.parametrize(("now_s", "want"), [(0.0, [2, 1, 1]), (ROTATION_S, [1, 1, 2])])
def test_remainder_streams_rotate(now_s: float, want: list[int]) -> None:
    """A stream that can't be divided goes to the next activator in each rotation."""
    credits = Credits(4)
    enter(credits, "abc", now_s)
    assert [credits.credit_of(name, now_s) for name in "abc"] == want


def test_each_activator_has_a_credit_of_one() -> None:
    """With more activators than streams each has a credit of one."""
    credits = Credits(3)
    enter(credits, "abcde")
    assert [credits.credit_of(name, 0.0) for name in "abcde"] == [1] * 5


def test_refused_activator_gets_the_next_stream() -> None:
    """A free stream is kept for the refused activator, before a second stream of another."""
    credits = Credits(2)
    assert enter(credits, "aab") == [True, True, False]
    credits.leave("a")
    assert enter(credits, "acab") == [False, False, False, True]
    credits.leave("a")
    assert enter(credits, "bac") == [False, False, True], "before a second one of b"
    credits.check_integrity()


def test_claim_expires() -> None:
    """A claim is kept for CLAIM_TTL_S."""
    credits = Credits(1)
    assert enter(credits, "ab") == [True, False]
    credits.leave("a")
    assert enter(credits, "a", CLAIM_TTL_S - 0.001) == [False]
    assert enter(credits, "a", CLAIM_TTL_S) == [True]


def test_activator_without_credits_is_admitted() -> None:
    """An old build is always admitted, since it would pass the refusal on. Its requests count for the others."""
    credits = Credits(2)
    for _ in range(3):
        credits.enter("old", 0.0)
    assert credits.active_requests == 3
    assert enter(credits, "a") == [False]
    for _ in range(3):
        credits.leave("old")
    assert enter(credits, "aa") == [True, True]


OPS = st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans(), st.sampled_from([0.0, 0.1, 0.6])), max_size=120)


@given(st.integers(1, 4), OPS)
def test_limit_is_never_exceeded(streams: int, steps: list[tuple[str, bool, float]]) -> None:
    """In any order of requests, the limit holds, and a credit is at least one."""
    credits, now_s, inside = Credits(streams), 0.0, []
    for name, asks, gap_s in steps:
        now_s += gap_s
        if asks and credits.try_enter(name, 3, now_s):
            inside.append(name)
        elif not asks and name in inside:
            inside.remove(name)
            credits.leave(name)
        assert credits.active_requests == len(inside) <= streams
        if name in inside:
            assert 1 <= credits.credit_of(name, now_s) <= streams
        credits.check_integrity()


@given(st.integers(1, 3), st.integers(1, 5), st.randoms(use_true_random=False))
def test_activator_that_keeps_asking_is_admitted(streams: int, more: int, draw: random.Random) -> None:
    """Refused activators are admitted in the order of their refusals, before any other gets a second stream."""
    names = [f"a{number}" for number in range(streams + more)]
    credits = Credits(streams)
    inside = names[:streams]
    assert enter(credits, inside) == [True] * streams
    refused = names[streams:]
    assert enter(credits, refused) == [False] * more
    for step in range(1, 20):
        gone = inside.pop(0)
        credits.leave(gone)
        asks = [*names]
        draw.shuffle(asks)
        taken = [name for name in asks if credits.try_enter(name, 9, step * CLAIM_TTL_S / 2)]
        assert taken == [refused[0]], "the first that was refused, and nobody beside it"
        # Activators without a stream were refused in the order in which they asked, behind all others.
        refused = refused[1:] + [name for name in asks if name == gone]
        inside += taken


def test_without_claims_an_activator_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without claims, a free stream goes to the next one that asks."""
    monkeypatch.setattr(Credits, "_reserved_streams", lambda self, activator, state: 0)
    credits = Credits(1)
    enter(credits, "a")
    for step in range(50):
        assert enter(credits, "b", step / 10) == [False]
        credits.leave("a")
        assert enter(credits, "a", step / 10) == [True]
