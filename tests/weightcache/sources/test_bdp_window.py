"""The throughput of a source without idle times, and the bytes in flight for links of any speed. Virtual time."""

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
from weightcache.sources.policy.fair_read_queue import ChunkKey, FairReadQueue, ReadLimit, WaiterIndex

MIB = 1 << 20
CHUNK = 8 * MIB
READS = 32  # KELVIN_STORE_READS of a remote store
CEILING = READS * RANGE_BYTES


def window_at_rate(rate: float, at_once: int = READS) -> BdpWindow:
    """Return a window that has measured this many bytes a second."""
    line = BdpWindow(at_once)
    line.end(line.begin(0.0), RANGE_BYTES, RANGE_BYTES / rate)
    return line


@pytest.mark.parametrize(
    ("line", "window", "size"),
    [
        pytest.param(BdpWindow(READS), FIRST_BYTES, MIB, id="nothing measured yet: little, in short ranges"),
        pytest.param(window_at_rate(25e6), 12_500_000, MIB, id="a slow link: half a second of it"),
        pytest.param(window_at_rate(80e6), 40_000_000, 2 * MIB, id="longer ranges, as there are enough of them"),
        pytest.param(window_at_rate(200e6), 100_000_000, 4 * MIB, id="ranges of full length"),
        pytest.param(window_at_rate(10e9), CEILING, 4 * MIB, id="a fast link: all that is allowed"),
        pytest.param(window_at_rate(1e3), LEAST_BYTES, MIB, id="a very slow one: some ranges"),
        pytest.param(BdpWindow(1), RANGE_BYTES, RANGE_BYTES, id="one read allowed: a long one"),
        pytest.param(window_at_rate(25e6, 4), 12_500_000, 2 * MIB, id="few reads allowed: longer ones"),
    ],
)
def test_window_is_half_a_second_of_the_measured_rate(line: BdpWindow, window: int, size: int) -> None:
    """The window is half a second of the measured rate, within bounds, and ranges are as long as the window allows."""
    assert (line.window_bytes, line.range_bytes) == (window, size)


@pytest.mark.parametrize(
    ("parts", "nbytes", "left", "want"),
    [
        pytest.param(0, 0, CHUNK, MIB, id="a part of a chunk"),
        pytest.param(0, 0, 4096, 4096, id="all of a short chunk"),
        pytest.param(0, 0, 0, 0, id="nothing of an empty chunk"),
        pytest.param(7, 7 * MIB, CHUNK, MIB, id="the last one that fits"),
        pytest.param(8, 8 * MIB, CHUNK, None, id="the window is full"),
        pytest.param(8, 8 * MIB - 4096, 4096, 4096, id="a short one fits where no long one does"),
        pytest.param(32, 32 * 4096, 4096, None, id="no more ranges than allowed, however short"),
    ],
)
def test_part_fits_the_window(parts: int, nbytes: int, left: int, want: int | None) -> None:
    """At a link that was not measured, a part begins if it fits beside the parts in flight."""
    assert BdpWindow(READS).next_part_bytes(parts, nbytes, left) == want


@given(
    st.integers(1, 128),
    st.lists(st.tuples(st.integers(0, 2 * RANGE_BYTES), st.floats(0, 100)), max_size=30),
    st.integers(0, 200),
    st.integers(0, 2 * CHUNK),
)
def test_window_and_ranges_are_bounded(at_once: int, reads: list[tuple[int, float]], parts: int, left: int) -> None:
    """After any measurements, a part may begin on an idle link, and never more than allowed."""
    line, now = BdpWindow(at_once), 0.0
    for nbytes, seconds in reads:
        read = line.begin(now)
        now += seconds
        line.end(read, nbytes, now)
    assert min(LEAST_BYTES, at_once * RANGE_BYTES) <= line.window_bytes <= at_once * RANGE_BYTES
    assert LEAST_RANGE_BYTES <= line.range_bytes <= RANGE_BYTES
    assert line.next_part_bytes(0, 0, left) == min(left, line.range_bytes)
    if parts >= at_once:
        assert line.next_part_bytes(parts, 0, left) is None
    elif parts:
        assert line.next_part_bytes(parts, line.window_bytes, left or 1) is None


@dataclass
class Transfer:
    key: ChunkKey
    nbytes: int
    left: float
    begins: float


class Wire:
    """A link that all transfers share. Each one waits, half or one and a half times `wait_s`, and is limited to a
    connection's rate.
    """

    def __init__(self, rate: float, wait_s: float, connection: float) -> None:
        self.chance = random.Random(1)
        self.rate, self.wait_s, self.connection = rate, wait_s, connection
        self.now = 0.0
        self.under_way: list[Transfer] = []

    def begin(self, key: ChunkKey, nbytes: int) -> Transfer:
        transfer = Transfer(key, nbytes, nbytes, self.now + self.wait_s * self.chance.uniform(0.5, 1.5))
        self.under_way.append(transfer)
        return transfer

    def next(self) -> Transfer:
        """Advance time to the end of the next transfer, and return it."""
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
    """Versions of `sizes` that are missed at once over a wire: a source's queue as `ReadScheduler` runs it."""

    def __init__(self, wire: Wire, read_limit: ReadLimit, window: BdpWindow, sizes: list[int]) -> None:
        self.wire, self.read_limit, self.window = wire, read_limit, window
        self.waiters = WaiterIndex()
        self.queue = FairReadQueue(self.waiters)
        self.left: dict[ChunkKey, int] = {}  # bytes of a chunk that have not begun
        self.missing: dict[int, int] = {}  # bytes of a version that have not arrived
        self.finished: dict[int, float] = {}
        self.reads: dict[int, line_policy.Transfer] = {}  # by the id of the wire's transfer
        for version, size in enumerate(sizes):
            self.miss(version, size)

    def miss(self, version: int, size: int) -> None:
        """Let a version of `size` bytes wait for the source from now on."""
        self.missing[version] = size
        chunks = {(str(version), str(begin)): min(CHUNK, size - begin) for begin in range(0, size, CHUNK)}
        self.waiters.enter(version, {key: position for position, key in enumerate(chunks)})
        self.queue.enter(version)
        for key, nbytes in chunks.items():
            self.left[key] = nbytes
            self.queue.add(key, nbytes)
        self.begin()

    def begin(self) -> None:
        while (head := self.queue.peek()) is not None:
            under_way = self.wire.under_way
            part = self.read_limit.next_part_bytes(len(under_way), sum(each.nbytes for each in under_way), head[1])
            if part is None:
                return
            key = self.queue.start_next(part)
            self.reads[id(self.wire.begin(key, part))] = self.window.begin(self.wire.now)
            self.left[key] -= part
            if self.left[key]:
                self.queue.add(key, self.left[key])

    def run(self) -> list[float]:
        """Return the time at which each version was complete."""
        while len(self.finished) < len(self.missing):
            self.step()
        return [self.finished[version] for version in self.missing]

    def step(self) -> None:
        """Let the next transfer end."""
        transfer = self.wire.next()
        self.window.end(self.reads.pop(id(transfer)), transfer.nbytes, self.wire.now)
        self.queue.end_part(transfer.key)
        version = int(transfer.key[0])
        self.missing[version] -= transfer.nbytes
        if not self.missing[version]:
            self.finished[version] = self.wire.now
        self.begin()


class Constant:
    """The control: always as many long ranges as allowed, whatever the link."""

    def next_part_bytes(self, running_parts: int, running_bytes: int, remaining_bytes: int) -> int | None:
        return min(remaining_bytes, RANGE_BYTES) if running_parts < READS else None


def run_storm(
    sizes: list[int], rate: float, wait_s: float = 0.03, read_limit: ReadLimit | None = None
) -> tuple[list[float], BdpWindow]:
    window = BdpWindow(READS)
    wire = Wire(rate, wait_s, 100e6)
    return Storm(wire, read_limit or window, window, sizes).run(), window


SIZES = [16 * MIB] * 30
RATES = [5e6, 25e6, 100e6]


@pytest.mark.parametrize("rate", RATES)
def test_thirty_small_loads_finish_fairly(rate: float) -> None:
    """Thirty versions of two chunks, missed at once, finish within 20 % of fair, and the link is never idle."""
    finished, line = run_storm(SIZES, rate)
    assert unfairness(finished, SIZES) <= 0.2
    assert max(finished) < 1.05 * sum(SIZES) / rate + 0.1
    assert line.bytes_per_s == pytest.approx(rate, rel=0.25)


@pytest.mark.parametrize("rate", RATES)
def test_control_constant_window_is_unfair(rate: float) -> None:
    """Negative control: with as much in flight as a fast link needs, the first versions finish far too early."""
    finished, _ = run_storm(SIZES, rate, read_limit=Constant())
    assert unfairness(finished, SIZES) > 0.5


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(16, 64), min_size=2, max_size=12),
    st.floats(2e6, 200e6),
    st.floats(0.001, 0.1),
)
def test_any_link_is_kept_busy(sizes: list[int], rate: float, wait_s: float) -> None:
    """For any rate and latency, all versions finish as soon as the link allows, except for the slow start."""
    nbytes = [size * MIB for size in sizes]
    finished, _ = run_storm(nbytes, rate, wait_s)
    assert max(finished) <= 1.1 * sum(nbytes) / rate + 8 * wait_s


@pytest.mark.parametrize("rate", [0.5e9, 1e9, 3e9])
def test_fast_link_is_used_from_the_start(rate: float) -> None:
    """The measured rate grows with each answer, so a model loads about as soon as with all reads allowed at once."""
    sizes = [512 * MIB]
    (slow_start,), line = run_storm(sizes, rate)
    (at_once,), _ = run_storm(sizes, rate, read_limit=Constant())
    assert slow_start < at_once + 0.1
    assert line.window_bytes == CEILING


def test_late_small_load_gets_its_share() -> None:
    """A small version that is missed during a storm waits for the bytes in flight, then gets a fifth of the link."""
    rate, size = 25e6, 8 * MIB
    window, wire = BdpWindow(READS), Wire(rate, 0.03, 100e6)
    storm = Storm(wire, window, window, [64 * MIB] * 4)
    for _ in range(40):
        storm.step()
    in_flight_bytes = sum(each.nbytes for each in wire.under_way)
    assert in_flight_bytes <= 2 * TARGET_WAIT_S * rate
    missed_at_s = wire.now
    storm.miss(4, size)
    while 4 not in storm.finished:
        storm.step()
    assert storm.finished[4] - missed_at_s < (in_flight_bytes + 5 * size) / rate + TARGET_WAIT_S


@pytest.mark.parametrize(("before", "after"), [(100e6, 25e6), (25e6, 100e6)])
def test_bdp_window_follows_the_rate(before: float, after: float) -> None:
    """If a link gets slower or faster, its rate is right after 20 reads."""
    line = window_at_rate(before)
    now = 1.0
    for _ in range(20):
        read = line.begin(now)
        now += RANGE_BYTES / after
        line.end(read, RANGE_BYTES, now)
    assert line.bytes_per_s == pytest.approx(after, rel=0.1)


def test_short_and_failed_reads_are_no_sample() -> None:
    """Short and failed reads leave the rate unchanged, and idle time does not count."""
    line = window_at_rate(50e6)
    for nbytes in (0, 4096):
        read = line.begin(10.0)
        line.end(read, nbytes, 20.0)
    assert line.bytes_per_s == 50e6
    line.end(line.begin(1000.0), RANGE_BYTES, 1000.0 + RANGE_BYTES / 50e6)
    assert line.bytes_per_s == pytest.approx(50e6)


def record_transfer(meter: ThroughputMeter, nbytes: int, begin: float, end: float) -> ThroughputMeter:
    meter.end(meter.begin(begin), nbytes, end)
    return meter


def test_no_throughput_before_the_first_transfer() -> None:
    """The rate is None, also during the first transfer."""
    meter = ThroughputMeter()
    assert meter.bytes_per_s is None
    meter.begin(0.0)
    assert meter.bytes_per_s is None


def test_throughput_of_sequential_transfers() -> None:
    """A hundred bytes in a second are a rate of 100. A refused transfer does not change it."""
    meter = record_transfer(ThroughputMeter(), 100, 0.0, 1.0)
    assert meter.bytes_per_s == 100
    meter.end(meter.begin(5.0), 0, 9.0)
    assert meter.bytes_per_s == 100


def test_idle_time_does_not_lower_throughput() -> None:
    assert record_transfer(record_transfer(ThroughputMeter(), 100, 0.0, 1.0), 100, 60.0, 61.0).bytes_per_s == 100


@pytest.mark.parametrize("apart_s", [0.0, 1e-6, 0.2], ids=["together", "all but together", "one by one"])
def test_concurrent_transfers_are_added_up(apart_s: float) -> None:
    """Four transfers that share a source of 400 bytes a second give a rate of 400, not 100, whenever they end."""
    meter = ThroughputMeter()
    begun = [meter.begin(0.0 + apart_s * number) for number in range(4)]
    for round_ in range(1, 20):
        for number in range(4):
            now = round_ + apart_s * number
            meter.end(begun[number], 100, now)
            begun[number] = meter.begin(now)
    assert meter.bytes_per_s == pytest.approx(400, rel=0.05)


def test_throughput_follows_a_slowdown() -> None:
    meter = record_transfer(ThroughputMeter(), 1000, 0.0, 1.0)
    for second in range(2, 22):
        record_transfer(meter, 10, second, second + 1.0)
    assert meter.bytes_per_s is not None
    assert 10 < meter.bytes_per_s < 12


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 10), st.booleans()), max_size=30))
def test_throughput_is_never_negative(transfers: list[tuple[int, float, bool]]) -> None:
    meter, now = ThroughputMeter(), 0.0
    for nbytes, duration_s, succeeded in transfers:
        transfer = meter.begin(now)
        now += duration_s
        meter.end(transfer, nbytes if succeeded else 0, now)
        assert meter.bytes_per_s is None or meter.bytes_per_s >= 0
