"""Affinity: requests of one session or prompt prefix meet at a replica, within its load bound, and few move when
replicas change.
"""

from collections import Counter

import pytest

from activator.routing.policy.affinity import (
    LOAD_BOUND,
    Affinity,
    HashRing,
    Occupancy,
    choose_replica,
    is_second_less_loaded,
    read_affinity,
)
from kelvin.contracts.errors import InvalidRequest, Refused

NAMES = ("a", "b", "c", "d")
KEYS = [f"key {number}".encode() for number in range(2000)]


def ring(*names: str) -> HashRing:
    made = HashRing()
    for name in names or NAMES:
        made.add(name)
    return made


def idle(*names: str) -> dict[str, Occupancy]:
    return dict.fromkeys(names or NAMES, Occupancy(0, 100))


def preferred(key: bytes, of: HashRing) -> str:
    return next(of.from_key(key))


def test_key_orders_all_replicas_deterministically() -> None:
    """The order does not depend on insertion, and first choices are spread evenly."""
    first, second = ring(*NAMES), ring(*reversed(NAMES))
    for key in KEYS[:200]:
        order = list(first.from_key(key))
        assert sorted(order) == sorted(NAMES)
        assert order == list(second.from_key(key))
    counts = Counter(preferred(key, first) for key in KEYS)
    assert min(counts.values()) > len(KEYS) / len(NAMES) / 2
    assert list(HashRing().from_key(b"x")) == []


def test_only_keys_of_a_changed_replica_move() -> None:
    """A removed replica's keys move to others. An added one takes keys, and no other key moves."""
    before, after = ring(*NAMES), ring(*NAMES)
    after.remove("b")
    moved = [key for key in KEYS if preferred(key, before) != preferred(key, after)]
    assert moved == [key for key in KEYS if preferred(key, before) == "b"]
    after.add("b")
    assert [preferred(key, before) for key in KEYS] == [preferred(key, after) for key in KEYS]


def _fill(is_session: bool, requests: int, keys: int) -> Counter[str]:
    """Choose a replica for so many requests of so many keys. Requests don't end."""
    taken: Counter[str] = Counter()
    of = ring()
    for number in range(requests):
        one = Affinity(KEYS[number % keys], is_session)
        name = choose_replica(one, of, {name: Occupancy(taken[name], 100) for name in NAMES})
        assert name is not None
        taken[name] += 1
    return taken


@pytest.mark.parametrize("keys", [1, 3, 2000])
def test_no_replica_has_more_than_its_share(keys: int) -> None:
    """The bound is a quarter over the mean, rounded up, even if all requests have one prefix."""
    taken = _fill(False, 200, keys)
    assert max(taken.values()) <= LOAD_BOUND * 200 / len(NAMES) + 1


def test_a_session_stays_while_there_is_a_slot() -> None:
    """Control: a session is bounded by the replica's own slots only."""
    assert _fill(True, 100, 1) == {preferred(KEYS[0], ring()): 100}
    assert max(_fill(True, 150, 1).values()) == 100


@pytest.mark.parametrize(
    ("taken", "want"),
    [
        pytest.param(idle(), 0, id="the first choice"),
        pytest.param({1: Occupancy(0, 1), 2: Occupancy(0, 1)}, 1, id="the first choice is not open: the next one"),
        pytest.param({0: Occupancy(1, 1), 1: Occupancy(0, 1)}, 1, id="the first choice is full"),
        pytest.param({0: Occupancy(3, 9), 1: Occupancy(0, 9)}, 1, id="the first choice has more than its share"),
        pytest.param({0: Occupancy(3, 9), 1: Occupancy(1, 1)}, 0, id="more than its share, and no slot elsewhere"),
        pytest.param({0: Occupancy(6, 90), 1: Occupancy(2, 10)}, 0, id="the share is of what a replica takes"),
        pytest.param({0: Occupancy(1, 1), 1: Occupancy(1, 1)}, None, id="no slot anywhere"),
        pytest.param({}, None, id="no replica"),
    ],
)
def test_key_chooses_first_replica_within_its_load_bound(taken: dict[str | int, Occupancy], want: int | None) -> None:
    """Replicas are numbered by the key's preference."""
    of = ring()
    order = list(of.from_key(KEYS[0]))
    named = {name if isinstance(name, str) else order[name]: one for name, one in taken.items()}
    assert choose_replica(Affinity(KEYS[0], False), of, named) == (None if want is None else order[want])


@pytest.mark.parametrize(
    ("session", "prefix", "want"),
    [
        pytest.param(None, None, None, id="neither"),
        pytest.param(b"s-1", b"once", Affinity(b"session t s-1", True), id="a session takes precedence over a prompt"),
        pytest.param(None, b"once", Affinity(b"prefix t once", False), id="a prompt's beginning"),
    ],
)
def test_session_header_precedes_prompt_prefix(
    session: bytes | None, prefix: bytes | None, want: Affinity | None
) -> None:
    """The tenant is t."""
    assert read_affinity("t", session, prefix) == want


@pytest.mark.parametrize("session", [b"", b"x" * 129, b"\xff", b"a\x07"])
def test_a_session_s_name_is_short_and_plain(session: bytes) -> None:
    """The refusal names the header."""
    with pytest.raises(Refused) as caught:
        read_affinity("t", session, None)
    assert isinstance(caught.value.failure, InvalidRequest)
    assert caught.value.failure.field == "x-kelvin-session"


@pytest.mark.parametrize(
    ("first", "second", "want"),
    [
        pytest.param(Occupancy(1, 8), Occupancy(0, 8), True, id="the emptier one"),
        pytest.param(Occupancy(0, 8), Occupancy(1, 8), False, id="the first if it is emptier"),
        pytest.param(Occupancy(3, 8), Occupancy(3, 8), False, id="a tie stays with the first"),
        pytest.param(Occupancy(2, 4), Occupancy(3, 16), True, id="by share, not by count"),
    ],
)
def test_replica_with_smaller_occupancy_is_less_loaded(first: Occupancy, second: Occupancy, want: bool) -> None:
    """True: the second replica is less loaded."""
    assert is_second_less_loaded(first, second) is want
