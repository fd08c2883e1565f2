"""A split gives each version its share, each asker always the same version, and moves as few as it can."""

from collections import Counter

import pytest

from activator.policy.split import assign

WHO = [f"key {number}" for number in range(4000)]


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param({"a": 1, "b": 1}, id="halves"),
        pytest.param({"a": 90, "b": 10}, id="nine to one"),
        pytest.param({"a": 5, "b": 3, "c": 2}, id="three of them"),
        pytest.param({"a": 1}, id="one has all"),
    ],
)
def test_shares_are_weights(weights: dict[str, int]) -> None:
    """Within a fifth, over thousands who ask; in whatever order they are named."""
    found = Counter(assign(weights, who) for who in WHO)
    total = sum(weights.values())
    for version, weight in weights.items():
        assert found[version] == pytest.approx(len(WHO) * weight / total, rel=0.2)
    assert [assign(dict(reversed(weights.items())), who) for who in WHO[:200]] == [
        assign(weights, who) for who in WHO[:200]
    ]


def test_a_growing_weight_only_takes() -> None:
    """Step by step from nothing to all: who has come to the new version stays there."""
    at_new: set[str] = set()
    for percent in (1, 5, 25, 50, 99):
        now = {who for who in WHO if assign({"old": 100 - percent, "new": percent}, who) == "new"}
        assert at_new <= now
        at_new = now


def test_a_third_version_takes_from_both_and_moves_nobody_between_them() -> None:
    """The control of hashing by remainder, which would shuffle all."""
    two, three = {"a": 5, "b": 5}, {"a": 5, "b": 5, "c": 5}
    moved = [(assign(two, who), assign(three, who)) for who in WHO]
    assert {pair for pair in moved if pair[0] != pair[1]} == {("a", "c"), ("b", "c")}
