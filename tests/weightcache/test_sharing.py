"""Which chunk a source is asked for next: shares hold at every moment, nobody starves, order within a version holds."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weightcache.policy.sharing import Flow, Key, Limit, Sharing, by_position

CHUNK = 100


def key(name: str) -> Key:
    return "acme", name


def queue(sharing: Sharing, flow: Flow, names: Iterable[str], nbytes: int = CHUNK) -> None:
    """What a version wants, in its order."""
    for position, name in enumerate(names):
        sharing.add(key(name), nbytes, {flow: position})


def drain(sharing: Sharing, count: int | None = None) -> list[str]:
    """The next ones, by name."""
    return [sharing.take()[1] for _ in range(len(sharing) if count is None else count)]


@pytest.mark.parametrize(
    ("nbytes", "limit", "want"),
    [
        pytest.param(1, Limit(4), 1, id="a chunk is a slot"),
        pytest.param(1 << 40, Limit(4), 1, id="however long"),
        pytest.param(8, Limit(4, 4), 2, id="or one for each range"),
        pytest.param(9, Limit(4, 4), 3, id="or part of one"),
        pytest.param(400, Limit(4, 4), 4, id="never more than there are"),
        pytest.param(0, Limit(4, 4), 1, id="an empty one still takes one"),
    ],
)
def test_slots(nbytes: int, limit: Limit, want: int) -> None:
    """What a chunk takes of what a source gives."""
    assert limit.slots(nbytes) == want


def test_who_was_first_is_first_in_each_round() -> None:
    """Two versions of equal weight take turns, the earlier one begins and ends first."""
    sharing = Sharing()
    sharing.enter("a")
    sharing.enter("b")
    queue(sharing, "b", ["b0", "b1", "b2"])
    queue(sharing, "a", ["a0", "a1", "a2"])
    assert drain(sharing) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_within_a_version_the_linear_space_is_the_order() -> None:
    """Whenever its chunks were queued."""
    sharing = Sharing()
    sharing.enter("a")
    for position in (2, 0, 1):
        sharing.add(key(str(position)), CHUNK, {"a": position})
    assert drain(sharing) == ["0", "1", "2"]
    assert by_position(["x", "y"], "acme") == {key("x"): 0, key("y"): 1}


def test_weights() -> None:
    """Three parts beside one."""
    sharing = Sharing()
    sharing.enter("a", 3.0)
    sharing.enter("b", 1.0)
    queue(sharing, "a", [f"a{n}" for n in range(30)])
    queue(sharing, "b", [f"b{n}" for n in range(30)])
    begun = drain(sharing, 40)
    assert sum(name.startswith("a") for name in begun) == 30
    assert sum(name.startswith("a") for name in begun[:20]) == 15


def test_bytes_count_not_chunks() -> None:
    """Two chunks of half the length are worth one."""
    sharing = Sharing()
    sharing.enter("a")
    sharing.enter("b")
    queue(sharing, "a", [f"a{n}" for n in range(4)], 200)
    queue(sharing, "b", [f"b{n}" for n in range(8)], 100)
    assert drain(sharing, 6) == ["a0", "b0", "b1", "a1", "b2", "b3"]


def test_who_comes_late_gets_a_share_and_no_arrears() -> None:
    """Of what was given away before it came nothing is made up for."""
    sharing = Sharing()
    sharing.enter("a")
    queue(sharing, "a", [f"a{n}" for n in range(20)])
    drain(sharing, 10)
    sharing.enter("b")
    queue(sharing, "b", [f"b{n}" for n in range(20)])
    begun = drain(sharing, 10)
    assert sum(name.startswith("b") for name in begun) == 5


def test_one_that_is_wanted_twice_is_queued_once() -> None:
    """It comes in the turn of whoever is first, at that one's cost, and stays as long as anybody wants it."""
    sharing = Sharing()
    sharing.enter("a")
    sharing.enter("b")
    queue(sharing, "a", ["a0", "both"])
    sharing.want(key("both"), "b", 0)
    queue(sharing, "b", [])
    sharing.add(key("b1"), CHUNK, {"b": 1})
    assert sharing.leave("a") == (key("a0"),)
    assert drain(sharing) == ["both", "b1"]
    sharing.want(key("both"), "b", 0)  # it is not queued any more: nothing
    assert sharing.next() is None


def test_nobody_waits_any_more() -> None:
    """The chunks that only one wanted lose their places."""
    sharing = Sharing()
    sharing.enter("a")
    sharing.enter("b")
    queue(sharing, "a", ["a0", "a1"])
    queue(sharing, "b", ["b0"])
    assert sharing.leave("a") == (key("a0"), key("a1"))
    assert drain(sharing) == ["b0"]


def test_a_prefetch_that_is_waited_for() -> None:
    """It lagged behind at a sixteenth; from the moment of its new weight it has an equal share."""
    sharing = Sharing()
    sharing.enter("a")
    sharing.enter("prefetch", 1 / 16)
    queue(sharing, "a", [f"a{n}" for n in range(60)])
    queue(sharing, "prefetch", [f"p{n}" for n in range(60)])
    assert sum(name.startswith("p") for name in drain(sharing, 34)) == 2
    sharing.weigh("prefetch", 1.0)
    assert sum(name.startswith("p") for name in drain(sharing, 10)) in (4, 5)


@settings(max_examples=60)
@given(
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=5),
    sizes=st.lists(st.integers(1, 8), min_size=40, max_size=40),
)
def test_shares_are_within_a_chunk_of_each(weights: list[float], sizes: list[int]) -> None:
    """Of any two that still wait: what each was given, by its weight, differs by at most a chunk of each, by theirs. So
    nobody starves.
    """
    sharing = Sharing()
    largest = max(sizes)
    left: dict[int, int] = {}
    length: dict[Key, int] = {}
    for flow, weight in enumerate(weights):
        sharing.enter(flow, weight)
        left[flow] = len(sizes)
        for position, size in enumerate(sizes):
            name = key(f"{flow}.{position}")
            length[name] = size
            sharing.add(name, size, {flow: position})
    given_to = dict.fromkeys(left, 0)
    while all(left.values()):
        begun = sharing.take()
        flow = int(begun[1].split(".")[0])
        left[flow] -= 1
        given_to[flow] += length[begun]
        for one in left:
            for other in left:
                apart = given_to[one] / weights[one] - given_to[other] / weights[other]
                assert apart <= largest / weights[one] + largest / weights[other] + 1e-9


class SharingMachine(RuleBasedStateMachine):
    """Versions that come, want, take, change their weight and leave, against a plain account of who wants what."""

    def __init__(self) -> None:
        super().__init__()
        self.sharing = Sharing()
        self.wants: dict[int, dict[Key, int]] = {}
        self.queued: set[Key] = set()
        self.flows = 0

    @rule(weight=st.sampled_from([0.1, 1.0, 3.0]))
    def enter(self, weight: float) -> None:
        self.sharing.enter(self.flows, weight)
        self.wants[self.flows] = {}
        self.flows += 1

    @precondition(lambda self: self.wants)
    @rule(data=st.data(), name=st.sampled_from("abcdefgh"), position=st.integers(0, 20), nbytes=st.integers(1, 9))
    def want(self, data: st.DataObject, name: str, position: int, nbytes: int) -> None:
        flow = data.draw(st.sampled_from(sorted(self.wants)))
        if key(name) in self.wants[flow]:
            return
        self.wants[flow][key(name)] = position
        if key(name) in self.queued:
            self.sharing.want(key(name), flow, position)
        else:
            wanted: dict[Flow, int] = {
                each: wants[key(name)] for each, wants in self.wants.items() if key(name) in wants
            }
            self.sharing.add(key(name), nbytes, wanted)
            self.queued.add(key(name))

    @precondition(lambda self: self.queued)
    @rule()
    def take(self) -> None:
        following = self.sharing.next()
        taken = self.sharing.take()
        assert taken == following
        self.queued.remove(taken)
        mine = [wants for wants in self.wants.values() if taken in wants]
        assert any(
            wants[taken] == min(position for each, position in wants.items() if each in self.queued | {taken})
            for wants in mine
        ), "it is the first of a version that wants it"

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.queued)))
        self.sharing.remove(gone)
        self.queued.remove(gone)

    @precondition(lambda self: self.wants)
    @rule(data=st.data(), weight=st.sampled_from([0.1, 1.0, 3.0]))
    def weigh(self, data: st.DataObject, weight: float) -> None:
        self.sharing.weigh(data.draw(st.sampled_from(sorted(self.wants))), weight)

    @precondition(lambda self: self.wants)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        flow = data.draw(st.sampled_from(sorted(self.wants)))
        gone = set(self.sharing.leave(flow))
        mine = self.wants.pop(flow)
        alone = {each for each in mine if each in self.queued and not any(each in w for w in self.wants.values())}
        assert gone == alone
        self.queued -= alone

    @invariant()
    def agrees(self) -> None:
        self.sharing.check_integrity()
        assert len(self.sharing) == len(self.queued)
        assert (self.sharing.next() is None) == (not self.queued)


TestSharing = SharingMachine.TestCase
TestSharing.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
