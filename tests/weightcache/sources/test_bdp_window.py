"""How fast a source is, idle times aside; how much is under way at the store, whatever its line. In virtual time."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstart_bench.suites.storm_bench import unfairness
from weightcache.sources.policy import bdp_window as line_policy
from weightcache.sources.policy.bdp_window import (
    FIRST_BYTES,
    LEAST_BYTES,
    LEAST_RANGE_BYTES,
    RANGE_BYTES,
    TARGET_WAIT_S,
    BdpWindow,
    ThroughputMeter,
)
from weightcache.sources.policy.fair_read_queue import FairReadQueue, Key, ReadLimit, WaiterIndex

MIB = 1 << 20
CHUNK = 8 * MIB
READS = 32  # KELVIN_STORE_READS of a store behind a line
CEILING = READS * RANGE_BYTES


def measured(rate: float, at_once: int = READS) -> BdpWindow:
    """One that has seen so many bytes a second."""
    line = BdpWindow(at_once)
    line.end(line.begin(0.0), RANGE_BYTES, RANGE_BYTES / rate)
    return line


@pytest.mark.parametrize(
    ("line", "window", "size"),
    [
        pytest.param(BdpWindow(READS), FIRST_BYTES, MIB, id="before anything was measured: little, in short ranges"),
        pytest.param(measured(25e6), 12_500_000, MIB, id="a slow line: half a second of it"),
        pytest.param(measured(80e6), 40_000_000, 2 * MIB, id="longer ranges, as there are enough of them"),
        pytest.param(measured(200e6), 100_000_000, 4 * MIB, id="and no longer ones than that"),
        pytest.param(measured(10e9), CEILING, 4 * MIB, id="a fast line: all that is allowed"),
        pytest.param(measured(1e3), LEAST_BYTES, MIB, id="a very slow one: some ranges"),
        pytest.param(BdpWindow(1), RANGE_BYTES, RANGE_BYTES, id="where one is allowed, a long one"),
        pytest.param(measured(25e6, 4), 12_500_000, 2 * MIB, id="where few are allowed, longer ones"),
    ],
)
def test_window(line: BdpWindow, window: int, size: int) -> None:
    """Bytes under way, and in how long ranges."""
    assert (line.window, line.range_bytes) == (window, size)


@pytest.mark.parametrize(
    ("parts", "nbytes", "left", "want"),
    [
        pytest.param(0, 0, CHUNK, MIB, id="a part of a chunk"),
        pytest.param(0, 0, 4096, 4096, id="or all, where it is short"),
        pytest.param(0, 0, 0, 0, id="or nothing, where it is empty"),
        pytest.param(7, 7 * MIB, CHUNK, MIB, id="the last one that fits"),
        pytest.param(8, 8 * MIB, CHUNK, None, id="the window is full"),
        pytest.param(8, 8 * MIB - 4096, 4096, 4096, id="a short one fits where no long one does"),
        pytest.param(32, 32 * 4096, 4096, None, id="no more ranges than allowed, however short"),
    ],
)
def test_part(parts: int, nbytes: int, left: int, want: int | None) -> None:
    """What may begin beside what is under way, of a line that was not measured."""
    assert BdpWindow(READS).part(parts, nbytes, left) == want


@given(
    st.integers(1, 128),
    st.lists(st.tuples(st.integers(0, 2 * RANGE_BYTES), st.floats(0, 100)), max_size=30),
    st.integers(0, 200),
    st.integers(0, 2 * CHUNK),
)
def test_bounds(at_once: int, reads: list[tuple[int, float]], parts: int, left: int) -> None:
    """Whatever it saw: something may begin where nothing is under way, and never more than allowed."""
    line, now = BdpWindow(at_once), 0.0
    for nbytes, seconds in reads:
        read = line.begin(now)
        now += seconds
        line.end(read, nbytes, now)
    assert min(LEAST_BYTES, at_once * RANGE_BYTES) <= line.window <= at_once * RANGE_BYTES
    assert LEAST_RANGE_BYTES <= line.range_bytes <= RANGE_BYTES
    assert line.part(0, 0, left) == min(left, line.range_bytes)
    if parts >= at_once:
        assert line.part(parts, 0, left) is None
    elif parts:
        assert line.part(parts, line.window, left or 1) is None


@dataclass
class Transfer:
    key: Key
    nbytes: int
    left: float
    begins: float


class Wire:
    """A line that all transfers share, each of which waits before it begins, half as long again or half as short, and
    is no faster than a connection.
    """

    def __init__(self, rate: float, wait_s: float, connection: float) -> None:
        self.chance = random.Random(1)
        self.rate, self.wait_s, self.connection = rate, wait_s, connection
        self.now = 0.0
        self.under_way: list[Transfer] = []

    def begin(self, key: Key, nbytes: int) -> Transfer:
        transfer = Transfer(key, nbytes, nbytes, self.now + self.wait_s * self.chance.uniform(0.5, 1.5))
        self.under_way.append(transfer)
        return transfer

    def next(self) -> Transfer:
        """The next that ends, at its time."""
        while True:
            moving = [each for each in self.under_way if each.begins <= self.now]
            if done := [each for each in moving if each.left < 1]:
                self.under_way.remove(done[0])
                return done[0]
            each_s = min(self.connection, self.rate / max(1, len(moving)))
            times = [each.left / each_s for each in moving]
            times += [each.begins - self.now for each in self.under_way if each.begins > self.now]
            passed = max(min(times), 1e-9)
            self.now += passed
            for each in moving:
                each.left -= passed * each_s


class Storm:
    """Versions of `sizes` that are missed at once, over a wire: a source's queue as `Turns` runs it."""

    def __init__(self, wire: Wire, room: ReadLimit, line: BdpWindow, sizes: list[int]) -> None:
        self.wire, self.room, self.line = wire, room, line
        wants = WaiterIndex()
        self.sharing = FairReadQueue(wants)
        self.left: dict[Key, int] = {}  # bytes of a chunk that did not begin
        self.missing = dict.fromkeys(range(len(sizes)), 0)  # bytes of a version that are not here
        self.finished: dict[int, float] = {}
        self.reads: dict[int, line_policy.Transfer] = {}  # by the transfer
        for version, size in enumerate(sizes):
            self.missing[version] = size
            chunks = {(str(version), str(at)): min(CHUNK, size - at) for at in range(0, size, CHUNK)}
            wants.enter(version, {key: position for position, key in enumerate(chunks)})
            self.sharing.enter(version)
            for key, nbytes in chunks.items():
                self.left[key] = nbytes
                self.sharing.add(key, nbytes)
            self.begin()

    def begin(self) -> None:
        while (following := self.sharing.next()) is not None:
            under_way = self.wire.under_way
            part = self.room.part(len(under_way), sum(each.nbytes for each in under_way), following[1])
            if part is None:
                return
            key = self.sharing.take(part)
            self.reads[id(self.wire.begin(key, part))] = self.line.begin(self.wire.now)
            self.left[key] -= part
            if self.left[key]:
                self.sharing.add(key, self.left[key])

    def run(self) -> list[float]:
        """When each version had all of its bytes."""
        while len(self.finished) < len(self.missing):
            transfer = self.wire.next()
            self.line.end(self.reads.pop(id(transfer)), transfer.nbytes, self.wire.now)
            self.sharing.end(transfer.key)
            version = int(transfer.key[0])
            self.missing[version] -= transfer.nbytes
            if not self.missing[version]:
                self.finished[version] = self.wire.now
            self.begin()
        return [self.finished[version] for version in self.missing]


class Constant:
    """The control: as many bytes as ever were allowed, in long ranges, whatever the line."""

    def part(self, parts: int, nbytes: int, left: int) -> int | None:
        return min(left, RANGE_BYTES) if parts < READS else None


def storm(
    sizes: list[int], rate: float, wait_s: float = 0.03, room: ReadLimit | None = None
) -> tuple[list[float], BdpWindow]:
    line = BdpWindow(READS)
    wire = Wire(rate, wait_s, 100e6)
    return Storm(wire, room or line, line, sizes).run(), line


SIZES = [16 * MIB] * 30
RATES = [5e6, 25e6, 100e6]


@pytest.mark.parametrize("rate", RATES)
def test_thirty_small_loads_finish_fairly(rate: float) -> None:
    """Thirty versions of two chunks each, missed at once, finish within 20 % of fair; the line is busy all the time."""
    finished, line = storm(SIZES, rate)
    assert unfairness(finished, SIZES) <= 0.2
    assert max(finished) < 1.05 * sum(SIZES) / rate + 0.1
    assert line.rate == pytest.approx(rate, rel=0.25)


@pytest.mark.parametrize("rate", RATES)
def test_control(rate: float) -> None:
    """With as much under way as a fast line needs, the first are far ahead of their share."""
    finished, _ = storm(SIZES, rate, room=Constant())
    assert unfairness(finished, SIZES) > 0.5


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(16, 64), min_size=2, max_size=12),
    st.floats(2e6, 200e6),
    st.floats(0.001, 0.1),
)
def test_any_line_is_busy(sizes: list[int], rate: float, wait_s: float) -> None:
    """Whatever its rate and however long answers wait: all is through as soon as the line allows, but for the start."""
    nbytes = [size * MIB for size in sizes]
    finished, _ = storm(nbytes, rate, wait_s)
    assert max(finished) <= 1.1 * sum(nbytes) / rate + 8 * wait_s


@pytest.mark.parametrize("rate", [0.5e9, 1e9, 3e9])
def test_a_fast_line_is_used_from_the_start(rate: float) -> None:
    """What is measured grows with each answer: a model comes about as soon as with all that is allowed at once."""
    sizes = [512 * MIB]
    (slow_start,), line = storm(sizes, rate)
    (at_once,), _ = storm(sizes, rate, room=Constant())
    assert slow_start < at_once + 0.1
    assert line.window == CEILING


def test_late_small_load_gets_its_share() -> None:
    """A small version that is missed in the middle of a storm is there after about as long as its share takes."""
    line, wire = BdpWindow(READS), Wire(25e6, 0.03, 100e6)
    run = Storm(wire, line, line, [64 * MIB] * 4)
    for _ in range(40):
        run.line.end(run.reads.pop(id(each := wire.next())), each.nbytes, wire.now)
        run.sharing.end(each.key)
        run.begin()
    assert sum(each.nbytes for each in wire.under_way) <= 2 * TARGET_WAIT_S * 25e6


@pytest.mark.parametrize(("before", "after"), [(100e6, 25e6), (25e6, 100e6)])
def test_bdp_window_follows_the_rate(before: float, after: float) -> None:
    """A line that others use as well, or no more, is measured anew within some reads."""
    line = measured(before)
    now = 1.0
    for _ in range(20):
        read = line.begin(now)
        now += RANGE_BYTES / after
        line.end(read, RANGE_BYTES, now)
    assert line.rate == pytest.approx(after, rel=0.1)


def test_short_and_failed_reads_are_no_sample() -> None:
    """Short reads and failed ones say nothing of the line; idle time does not count."""
    line = measured(50e6)
    for nbytes in (0, 4096):
        read = line.begin(10.0)
        line.end(read, nbytes, 20.0)
    assert line.rate == 50e6
    line.end(line.begin(1000.0), RANGE_BYTES, 1000.0 + RANGE_BYTES / 50e6)
    assert line.rate == pytest.approx(50e6)


def moved(pace: ThroughputMeter, nbytes: int, begin: float, end: float) -> ThroughputMeter:
    pace.end(pace.begin(begin), nbytes, end)
    return pace


def test_no_pace_before_the_first_transfer() -> None:
    """Nothing is known, also while it is under way."""
    pace = ThroughputMeter()
    assert pace.rate is None
    pace.begin(0.0)
    assert pace.rate is None


def test_pace_of_one_transfer_after_another() -> None:
    """A hundred bytes in a second are a hundred a second; a refusal is not a slow transfer."""
    pace = moved(ThroughputMeter(), 100, 0.0, 1.0)
    assert pace.rate == 100
    pace.end(pace.begin(5.0), 0, 9.0)
    assert pace.rate == 100


def test_idle_time_does_not_slow_a_pace() -> None:
    """Time without transfers does not count."""
    assert moved(moved(ThroughputMeter(), 100, 0.0, 1.0), 100, 60.0, 61.0).rate == 100


@pytest.mark.parametrize("apart_s", [0.0, 1e-6, 0.2], ids=["together", "all but together", "one by one"])
def test_transfers_abreast_are_one_pace(apart_s: float) -> None:
    """Four that share a source of four hundred a second are told from a source of a hundred, however they end."""
    pace = ThroughputMeter()
    begun = [pace.begin(0.0 + apart_s * number) for number in range(4)]
    for round_ in range(1, 20):
        for number in range(4):
            now = round_ + apart_s * number
            pace.end(begun[number], 100, now)
            begun[number] = pace.begin(now)
    assert pace.rate == pytest.approx(400, rel=0.05)


def test_throughput_follows_a_slowdown() -> None:
    """What became slower is known after a few transfers."""
    pace = moved(ThroughputMeter(), 1000, 0.0, 1.0)
    for second in range(2, 22):
        moved(pace, 10, second, second + 1.0)
    assert pace.rate is not None
    assert 10 < pace.rate < 12


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 10), st.booleans()), max_size=30))
def test_no_pace_is_negative(transfers: list[tuple[int, float, bool]]) -> None:
    """Whatever comes and fails, no rate is negative."""
    pace, now = ThroughputMeter(), 0.0
    for nbytes, took_s, came in transfers:
        transfer = pace.begin(now)
        now += took_s
        pace.end(transfer, nbytes if came else 0, now)
        assert pace.rate is None or pace.rate >= 0
