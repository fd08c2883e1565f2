"""Which chunk is read next from a source: shares are fair at all times, and no flow starves."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weightcache.sources.policy.fair_read_queue import (
    MAX_CREDIT_BYTES,
    ChunkCountLimit,
    ChunkKey,
    FairReadQueue,
    Flow,
    WaiterIndex,
    positions_by_chunk,
)

CHUNK = 100


def key(name: str) -> ChunkKey:
    return "acme", name


class World:
    """One source, whose flows enter and leave as in `ReadScheduler`."""

    def __init__(self) -> None:
        self.wants = WaiterIndex()
        self.sharing = FairReadQueue(self.wants)

    def enter(self, flow: Flow, names: Iterable[str], weight: float = 1.0) -> None:
        """Enter a flow that wants these chunks in this order."""
        self.wants.enter(flow, {key(name): position for position, name in enumerate(names)})
        self.sharing.enter(flow, weight)

    def queue(self, names: Iterable[str], nbytes: int = CHUNK) -> None:
        for name in names:
            self.sharing.add(key(name), nbytes)

    def leave(self, flow: Flow) -> tuple[ChunkKey, ...]:
        self.wants.leave(flow)
        return self.sharing.leave(flow)

    def begin(self, count: int) -> list[str]:
        """Return the names of the next chunks. Their reads have begun."""
        return [self.sharing.start_next()[1] for _ in range(count)]

    def drain(self, count: int | None = None) -> list[str]:
        """Return the names of the next chunks. Each read ends before the next begins."""
        names = list[str]()
        for _ in range(len(self.sharing) if count is None else count):
            names += self.begin(1)
            self.sharing.end_part(key(names[-1]))
        return names


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


@pytest.mark.parametrize(
    ("parts", "left", "want"),
    [
        pytest.param(0, 1, 1, id="a chunk is a part"),
        pytest.param(3, 1 << 40, 1 << 40, id="a part may be of any length"),
        pytest.param(0, 0, 0, id="an empty chunk is a part"),
        pytest.param(4, 1, None, id="no more parts than allowed"),
    ],
)
def test_limit_counts_chunks_of_any_length(parts: int, left: int, want: int | None) -> None:
    """A source with room for four chunks at once starts no fifth one, whatever their length."""
    assert ChunkCountLimit(4).next_part_bytes(parts, parts << 40, left) == want


def test_earlier_flow_is_first_in_each_round() -> None:
    """Two versions of equal weight take turns, and the earlier one begins and ends first."""
    world = World()
    world.enter("a", numbered("a", 3))
    world.enter("b", numbered("b", 3))
    world.queue(numbered("b", 3))
    world.queue(numbered("a", 3))
    assert world.drain() == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_chunks_of_a_version_are_read_in_order() -> None:
    """The order in which chunks were queued does not matter."""
    world = World()
    world.enter("a", numbered("a", 3))
    world.queue(["a2", "a0", "a1"])
    assert world.drain() == ["a0", "a1", "a2"]


def test_flow_gets_chunks_by_its_weight() -> None:
    """A flow of weight 3 gets three chunks for each one of a flow of weight 1."""
    world = World()
    for flow, weight in (("a", 3.0), ("b", 1.0)):
        world.enter(flow, numbered(flow, 30), weight)
        world.queue(numbered(flow, 30))
    begun = world.drain(40)
    assert sum(name.startswith("a") for name in begun) == 30
    assert sum(name.startswith("a") for name in begun[:20]) == 15


def test_bytes_count_not_chunks() -> None:
    """Two chunks of half the length count as one."""
    world = World()
    world.enter("a", numbered("a", 4))
    world.enter("b", numbered("b", 8))
    world.queue(numbered("a", 4), 200)
    world.queue(numbered("b", 8), 100)
    assert world.drain(6) == ["a0", "b0", "b1", "a1", "b2", "b3"]


def test_late_flow_gets_a_share_without_credit() -> None:
    """A flow that enters late gets half of the reads from then on, and no more."""
    world = World()
    world.enter("a", numbered("a", 20))
    world.queue(numbered("a", 20))
    world.drain(10)
    world.enter("b", numbered("b", 20))
    world.queue(numbered("b", 20))
    assert sum(name.startswith("b") for name in world.drain(10)) == 5


def test_blocked_flow_gets_credit() -> None:
    """A flow whose chunks were queued late is served alone until it has caught up, within bounds."""
    world = World()
    for flow in "ab":
        world.enter(flow, numbered(flow, 20))
    world.queue(numbered("a", 20))
    world.drain(10)
    world.queue(numbered("b", 20))
    assert world.drain(12) == [*numbered("b", 10), "a10", "b10"]


def test_credit_is_bounded() -> None:
    """After a long idle time a flow is served alone only up to `MAX_CREDIT_BYTES`."""
    world = World()
    for flow in "ab":
        world.enter(flow, numbered(flow, 40))
    world.queue(numbered("a", 40), MAX_CREDIT_BYTES // 4)
    world.drain(20)
    world.queue(numbered("b", 40), MAX_CREDIT_BYTES // 4)
    assert sum(name.startswith("b") for name in world.drain(20)) in (12, 13)


def test_running_reads_count_as_received() -> None:
    """One flow has four reads running. A new flow gets four before the first one gets another."""
    world = World()
    world.enter("a", numbered("a", 20))
    world.queue(numbered("a", 20))
    world.drain(5)
    world.begin(4)
    world.enter("b", numbered("b", 20))
    world.queue(numbered("b", 20))
    assert world.drain(6) == ["b0", "b1", "b2", "b3", "a9", "b4"]


def test_reads_that_end_while_none_may_begin_still_count() -> None:
    """Eight reads of one flow ended while the other waited, so the other gets eight reads first."""
    world = World()
    world.enter("a", numbered("a", 20))
    world.queue(numbered("a", 20))
    world.begin(8)
    world.enter("b", numbered("b", 20))
    world.queue(numbered("b", 20))
    for number in range(8):
        world.sharing.end_part(key(f"a{number}"))
    assert world.drain(10) == [*numbered("b", 8), "a8", "b8"]


def test_parts_of_chunks_take_turns() -> None:
    """Chunks that are read in parts alternate part by part, and each part counts its own bytes."""
    world = World()
    for flow in "ab":
        world.enter(flow, numbered(flow, 1))
        world.queue(numbered(flow, 1))
    begun = list[tuple[str, int]]()
    while (following := world.sharing.peek()) is not None:
        chunk, left = following
        part = min(40, left)
        assert world.sharing.start_next(part) == chunk
        begun.append((chunk[1], part))
        if left > part:
            world.sharing.add(chunk, left - part)
    assert begun == [("a0", 40), ("b0", 40), ("a0", 40), ("b0", 40), ("a0", 20), ("b0", 20)]
    for name, _ in begun:
        world.sharing.check_integrity()
        world.sharing.end_part(key(name))


def test_chunk_wanted_twice_is_queued_once() -> None:
    """The chunk counts for the flow that reaches it first, and stays queued while any flow wants it."""
    world = World()
    world.enter("a", ["a0", "both"])
    world.queue(["a0", "both"])
    world.enter("b", ["both", "b1"])
    world.queue(["b1"])
    assert world.leave("a") == (key("a0"),)
    assert world.drain() == ["both", "b1"]
    world.enter("c", ["both"])  # the chunk is no longer queued, so the flow has nothing to read
    assert world.sharing.peek() is None


def test_unwanted_chunks_leave_the_queue() -> None:
    """Chunks that only the leaving flow wanted are removed from the queue."""
    world = World()
    for flow, count in (("a", 2), ("b", 1)):
        world.enter(flow, numbered(flow, count))
        world.queue(numbered(flow, count))
    assert world.leave("a") == (key("a0"), key("a1"))
    assert world.drain() == ["b0"]


def test_prefetch_with_a_waiter_gets_an_equal_share() -> None:
    """At weight 1/16 the prefetch lags behind. After its weight is raised to 1, it gets an equal share."""
    world = World()
    for flow, weight in (("a", 1.0), ("prefetch", 1 / 16)):
        world.enter(flow, numbered(flow, 60), weight)
        world.queue(numbered(flow, 60))
    assert sum(name.startswith("p") for name in world.drain(34)) == 2
    world.sharing.set_weight("prefetch", 1.0)
    assert sum(name.startswith("p") for name in world.drain(10)) in (4, 5)


@settings(max_examples=60)
@given(
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=5),
    sizes=st.lists(st.integers(1, 8), min_size=40, max_size=40),
)
def test_shares_are_within_a_chunk_of_each(weights: list[float], sizes: list[int]) -> None:
    """The bytes per weight of any two waiting flows differ by at most one chunk of each, so no flow starves."""
    world = World()
    largest = max(sizes)
    left: dict[int, int] = {}
    length: dict[ChunkKey, int] = {}
    for flow, weight in enumerate(weights):
        names = numbered(f"{flow}.", len(sizes))
        world.enter(flow, names, weight)
        left[flow] = len(sizes)
        for name, size in zip(names, sizes, strict=True):
            length[key(name)] = size
            world.queue([name], size)
    received_bytes = dict.fromkeys(left, 0)
    while all(left.values()):
        begun = key(*world.drain(1))
        flow = int(begun[1].split(".")[0])
        left[flow] -= 1
        received_bytes[flow] += length[begun]
        for one in left:
            for other in left:
                apart = received_bytes[one] / weights[one] - received_bytes[other] / weights[other]
                assert apart <= largest / weights[one] + largest / weights[other] + 1e-9


class SharingMachine(RuleBasedStateMachine):
    """Flows that enter, read, change their weight and leave, compared with a simple model of the wanted chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.sharing = self.world.sharing
        self.wants: dict[int, list[ChunkKey]] = {}  # in order of position
        self.queued: set[ChunkKey] = set()
        self.running: set[ChunkKey] = set()
        self.flows = 0

    @rule(weight=st.sampled_from([0.1, 1.0, 3.0]), names=st.lists(st.sampled_from("abcdefgh"), unique=True))
    def enter(self, weight: float, names: list[str]) -> None:
        self.world.enter(self.flows, names, weight)
        self.wants[self.flows] = [key(name) for name in names]
        self.flows += 1

    @precondition(lambda self: self.unqueued())
    @rule(data=st.data(), nbytes=st.integers(1, 9))
    def add(self, data: st.DataObject, nbytes: int) -> None:
        wanted = data.draw(st.sampled_from(sorted(self.unqueued())))
        self.sharing.add(wanted, nbytes)
        self.queued.add(wanted)

    @precondition(lambda self: self.queued)
    @rule()
    def take(self) -> None:
        following = self.sharing.peek()
        taken = self.sharing.start_next()
        assert following is not None
        assert taken == following[0]
        wanting = [wants for wants in self.wants.values() if taken in wants]
        assert any(taken == next(each for each in wants if each in self.queued) for wants in wanting), (
            "it is not the first queued chunk of any flow that wants it"
        )
        self.queued.remove(taken)
        self.running.add(taken)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ended = data.draw(st.sampled_from(sorted(self.running)))
        self.sharing.end_part(ended)
        self.running.remove(ended)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.queued)))
        self.sharing.remove(gone)
        self.queued.remove(gone)

    @precondition(lambda self: self.wants)
    @rule(data=st.data(), weight=st.sampled_from([0.1, 1.0, 3.0]))
    def set_weight(self, data: st.DataObject, weight: float) -> None:
        self.sharing.set_weight(data.draw(st.sampled_from(sorted(self.wants))), weight)

    @precondition(lambda self: self.wants)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        flow = data.draw(st.sampled_from(sorted(self.wants)))
        gone = set(self.world.leave(flow))
        del self.wants[flow]
        abandoned = self.queued - self.wanted()
        assert gone == abandoned
        self.queued -= abandoned

    def wanted(self) -> set[ChunkKey]:
        return {each for wants in self.wants.values() for each in wants}

    def unqueued(self) -> set[ChunkKey]:
        return self.wanted() - self.queued - self.running

    @invariant()
    def agrees(self) -> None:
        self.sharing.check_integrity()
        assert len(self.sharing) == len(self.queued)
        assert (self.sharing.peek() is None) == (not self.queued)


TestSharing = SharingMachine.TestCase
TestSharing.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_flows_keep_their_own_positions() -> None:
    """Each flow has its own positions. Chunks that no flow wants any more are forgotten."""
    wants = WaiterIndex()
    wants.enter("v", {key("a"): 0, key("both"): 1})
    wants.enter("w", {key("both"): 0})
    assert wants.chunks_of("v") == {key("a"): 0, key("both"): 1}
    assert wants.flows_of(key("both")) == {"v": 1, "w": 0}
    wants.leave("v")
    assert "v" not in wants
    assert "w" in wants
    assert wants.flows_of(key("both")) == {"w": 0}
    assert not wants.flows_of(key("a"))
    wants.leave("w")
    assert repr(wants) == "<WaiterIndex flows=0 chunks=0>"


def test_chunks_are_ordered_by_position() -> None:
    """Positions follow the order of the linear space."""
    assert positions_by_chunk(["x", "y"], "acme") == {key("x"): 0, key("y"): 1}
