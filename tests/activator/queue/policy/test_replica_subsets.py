"""Preferred replicas of each activator: every replica is preferred evenly, by few activators, and few preferences
change.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activator.queue.policy.replica_subsets import MIN_REPLICAS, activators_per_replica, preferred_replicas, uses_all


def names(what: str, count: int) -> list[str]:
    return [f"{what}-{number}" for number in range(count)]


def preferences(doors: list[str], replicas: list[str], slots: int) -> dict[str, frozenset[str]]:
    return {door: preferred_replicas(doors, replicas, door, slots) for door in doors}


@pytest.mark.parametrize(
    ("slots", "want"), [(1, 1), (4, 1), (8, 2), (15, 3), (16, 4), (64, 4)], ids=lambda number: str(number)
)
def test_sharers_follow_the_slots_of_a_replica(slots: int, want: int) -> None:
    """A quarter of the slots, at least one and at most four."""
    assert activators_per_replica(slots) == want


@pytest.mark.parametrize(
    ("doors", "replicas", "slots", "want"),
    [
        pytest.param(1, 9, 8, 9, id="alone: all"),
        pytest.param(2, 9, 8, 9, id="two activators, where two share a replica: all"),
        pytest.param(4, 9, 64, 9, id="four, where four do: all"),
        pytest.param(4, 8, 8, 4, id="four, where two do: half"),
        pytest.param(16, 64, 64, 16, id="sixteen, where four do: a quarter"),
        pytest.param(5, 12, 1, 3, id="what does not divide is rounded up"),
        pytest.param(9, 3, 8, 2, id="more activators than replicas: two each"),
        pytest.param(9, 2, 8, 2, id="two replicas: both"),
        pytest.param(9, 1, 8, 1, id="one replica"),
        pytest.param(9, 0, 8, 0, id="no replica"),
    ],
)
def test_each_activator_prefers_equally_many_replicas(doors: int, replicas: int, slots: int, want: int) -> None:
    found = preferences(names("door", doors), names("replica", replicas), slots)
    assert {len(each) for each in found.values()} == {want}


def test_unknown_activator_prefers_all_replicas() -> None:
    """The others don't know it yet. It uses all replicas, as if alone."""
    assert len(preferred_replicas(names("door", 9), names("replica", 9), "new", 1)) == 9


@settings(deadline=None)
@given(doors=st.integers(1, 12), replicas=st.integers(1, 24), slots=st.integers(1, 64), seed=st.integers(0, 10**6))
def test_every_replica_is_preferred_by_some_activator(doors: int, replicas: int, slots: int, seed: int) -> None:
    """This holds for any numbers, in any order."""
    doors_, replicas_ = names(f"door-{seed}", doors), names(f"replica-{seed}", replicas)
    found = preferences(doors_, replicas_, slots)
    assert frozenset().union(*found.values()) == frozenset(replicas_)
    assert min(map(len, found.values())) >= min(MIN_REPLICAS, replicas)
    assert len(set(map(len, found.values()))) == 1
    assert preferred_replicas(doors_[::-1], replicas_[::-1], doors_[0], slots) == found[doors_[0]]


@pytest.mark.parametrize(("doors", "replicas", "slots"), [(5, 20, 8), (8, 32, 8), (16, 64, 64), (6, 12, 1)])
def test_activators_spread_evenly_over_replicas(doors: int, replicas: int, slots: int) -> None:
    """No replica is preferred by more than twice the average number of activators."""
    for seed in range(5):
        found = preferences(names(f"door-{seed}", doors), names(f"replica-{seed}", replicas), slots)
        having = Counter(replica for each in found.values() for replica in each)
        assert max(having.values()) <= 2 * sum(having.values()) / replicas


def preferences_by_index(doors: list[str], replicas: list[str], slots: int) -> dict[str, frozenset[str]]:
    """Control: assign consecutive replicas by index."""
    number = max(MIN_REPLICAS, -(-len(replicas) * activators_per_replica(slots) // len(doors)))
    return {
        door: frozenset(replicas[(at * number + offset) % len(replicas)] for offset in range(number))
        for at, door in enumerate(doors)
    }


def moved(before: dict[str, frozenset[str]], after: dict[str, frozenset[str]]) -> float:
    """Return the share of changed preferences among activators that stay."""
    stay = before.keys() & after.keys()
    return sum(len(after[door] - before[door]) for door in stay) / sum(len(after[door]) for door in stay)


@pytest.mark.parametrize(
    ("doors", "replicas", "slots", "most"),
    [
        pytest.param(8, 32, 8, 0.3, id="8 and 32"),
        pytest.param(5, 20, 8, 0.3, id="5 and 20"),
        pytest.param(12, 48, 8, 0.3, id="12 and 48"),
    ],
)
def test_few_preferences_change_when_an_activator_leaves(doors: int, replicas: int, slots: int, most: float) -> None:
    """The same holds when it returns. Control: by index, nearly half of all preferences change."""
    shares, others = [], []
    for seed in range(5):
        every, of = names(f"door-{seed}", doors), names(f"replica-{seed}", replicas)
        less = every[1:]
        shares.append(moved(preferences(every, of, slots), preferences(less, of, slots)))
        shares.append(moved(preferences(less, of, slots), preferences(every, of, slots)))
        others.append(moved(preferences_by_index(every, of, slots), preferences_by_index(less, of, slots)))
    assert sum(shares) / len(shares) < most < sum(others) / len(others)


@pytest.mark.parametrize(("doors", "replicas", "slots"), [(8, 32, 8), (5, 20, 8), (16, 64, 64)])
def test_few_preferences_change_when_a_replica_leaves(doors: int, replicas: int, slots: int) -> None:
    """The same holds when it returns."""
    shares = []
    for seed in range(5):
        every, of = names(f"door-{seed}", doors), names(f"replica-{seed}", replicas)
        shares.append(moved(preferences(every, of, slots), preferences(every, of[1:], slots)))
        shares.append(moved(preferences(every, of[1:], slots), preferences(every, of, slots)))
    assert sum(shares) / len(shares) < 0.3


@pytest.mark.parametrize(
    ("at_once", "want"),
    [pytest.param(7, False, id="fewer than replicas"), pytest.param(8, True, id="one for each")],
)
def test_busy_activator_uses_all_replicas(at_once: int, want: bool) -> None:
    """There are eight replicas."""
    assert uses_all(at_once, 8) == want
