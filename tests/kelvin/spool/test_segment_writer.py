"""A commit makes a record durable under the next sequence, or raises and leaves no hole."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.spool.segment_disk import SegmentDisk, segments
from kelvin.spool.segment_reader import SegmentReader, last_sequence
from kelvin.spool.segment_writer import Make, SegmentWriter
from tests.kelvin.spool.disks import FailingDisk, LosingDisk

SEGMENT = 4096


def make(text: str) -> Make:
    """Return a function that makes a record with its own sequence."""
    return lambda sequence: f"{sequence}:{text}".encode()


def read_all(directory: Path) -> list[bytes]:
    """Return all records that a recovery could read."""
    tail = SegmentReader(directory)
    batch = tail.read(last_sequence(directory), 10**9, 10**9)
    tail.close()
    return [] if batch is None else list(batch.payloads)


def test_sequences_are_gapless_from_one(tmp_path: Path) -> None:
    """Sequences have no gap between groups and segments."""
    journal = SegmentWriter(tmp_path, segment_bytes=SEGMENT)
    got = [journal.commit([make("a" * 700)] * size) for size in (1, 3, 7, 20)]
    assert [sequence for group in got for sequence in group] == list(range(1, 32))
    journal.check_integrity()
    journal.close()
    assert read_all(tmp_path) == [make("a" * 700)(sequence) for sequence in range(1, 32)]
    assert len(segments(tmp_path)) > 5


def test_a_close_that_fails_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may report an error only at close. Another file may have the descriptor by then."""
    directory, other, close, closed = tmp_path / "spool", tmp_path / "other", os.close, list[int]()
    directory.mkdir()

    def failing(fd: int) -> None:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        close(fd)
        if is_file:
            closed.append(os.open(other, os.O_RDWR | os.O_CREAT))
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    journal = SegmentWriter(directory, segment_bytes=SEGMENT)
    tail = SegmentReader(directory)
    assert journal.commit([make("a" * 4000)]) == [1]
    tail.acknowledge(1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", failing)
        outcomes = journal.commit([make("b" * 4000)])
        tail.close()
    first, second = closed
    os.write(first, b"another's")
    assert outcomes == [2]
    assert journal.commit([make("c" * 4000)]) == [3]
    journal.close()
    tail.close()
    assert other.read_bytes() == b"another's"
    close(first)
    close(second)


def test_a_record_that_cannot_be_made_takes_no_sequence(tmp_path: Path) -> None:
    """Its caller gets the exception, and the other records are written."""

    def broken(_: int) -> bytes:
        raise KeyError("no such field")

    journal = SegmentWriter(tmp_path)
    first, second, third, fourth = journal.commit([make("a"), broken, lambda _: b"", make("b")])
    assert (first, fourth) == (1, 2)
    assert isinstance(second, KeyError)
    assert isinstance(third, ValueError)
    journal.close()
    assert read_all(tmp_path) == [b"1:a", b"2:b"]


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param("create", id="no room for a segment"),
        pytest.param("write", id="half of the write is done, then the disk is full"),
        pytest.param("sync", id="the sync fails"),
        pytest.param("sync_directory", id="the new name does not become durable"),
    ],
)
@pytest.mark.parametrize(
    "before", [pytest.param(0, id="at record 1"), pytest.param(1, id="at record 2"), pytest.param(3, id="at record 4")]
)
@pytest.mark.parametrize("cut", [pytest.param(False, id="the tail is cut"), pytest.param(True, id="it cannot be cut")])
def test_a_failing_disk_raises_and_leaves_nothing_behind(
    tmp_path: Path, operation: str, before: int, cut: bool
) -> None:
    """The append raises, and its sequence goes to the next record. Exactly the acknowledged records are readable."""
    disk = FailingDisk()
    journal = SegmentWriter(tmp_path, disk=disk, segment_bytes=SEGMENT)
    acknowledged = [f"{sequence}:kept".encode() for sequence in journal.commit([make("kept")] * before)]
    if operation in ("create", "sync_directory") and before:
        journal.close()  # these operations happen only for a new segment
    disk.fail = {operation, "truncate"} if cut else {operation}
    for outcome in journal.commit([make("lost"), make("lost as well")]):
        assert isinstance(outcome, Refused)
        assert outcome.failure == Unavailable("the usage spool (its disk is full)")
        assert isinstance(outcome.__cause__, OSError)
    disk.fail.clear()
    assert journal.committed == before
    acknowledged += [f"{sequence}:after".encode() for sequence in journal.commit([make("after")] * 2)]
    journal.check_integrity()
    journal.close()
    assert read_all(tmp_path) == acknowledged
    assert len(acknowledged) == before + 2


def test_a_group_over_two_segments_fails_only_in_its_second_part(tmp_path: Path) -> None:
    """Records that were durable before the disk was full keep their sequences."""

    class FullAfterOneSegment(SegmentDisk):
        made = 0

        def create(self, path: Path, size: int) -> int:
            self.made += 1
            if self.made == 2:
                raise OSError("full")
            return super().create(path, size)

    journal = SegmentWriter(tmp_path, disk=FullAfterOneSegment(), segment_bytes=SEGMENT)
    outcomes = journal.commit([make("a" * 1000)] * 6)
    assert outcomes[:4] == [1, 2, 3, 4] or outcomes[:3] == [1, 2, 3]
    assert all(isinstance(outcome, Refused) for outcome in outcomes[journal.committed :])
    assert journal.committed == len(read_all(tmp_path))
    journal.close()


def test_the_backlog_is_bounded(tmp_path: Path) -> None:
    """Above the limit, an append is refused as an overload. It is accepted again once records were shipped."""
    journal = SegmentWriter(tmp_path, segment_bytes=SEGMENT, limit_bytes=2 * SEGMENT)
    outcomes = journal.commit([make("a" * 1000)] * 12)
    refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
    assert {outcome.failure for outcome in refused} == {Overloaded("the usage spool", 2 * SEGMENT, 1.0, "bytes")}
    tail = SegmentReader(tmp_path)
    tail.read(journal.committed, 100, 10**9)
    tail.acknowledge(journal.committed)
    assert journal.commit([make("again")]) == [len(outcomes) - len(refused) + 1]
    journal.close()
    tail.close()


def test_a_reopened_source_goes_on(tmp_path: Path) -> None:
    """After a torn last group, the next sequence follows the last complete record."""
    journal = SegmentWriter(tmp_path)
    journal.commit([make("a")] * 3)
    journal.close()
    path = tmp_path / f"{1:020d}.seg"
    path.write_bytes(path.read_bytes() + b"\x20\x00\x00\x00torn")
    again = SegmentWriter(tmp_path)
    assert again.commit([make("b")]) == [4]
    again.close()
    assert read_all(tmp_path) == [b"1:a", b"2:a", b"3:a", b"4:b"]


@given(
    groups=st.lists(st.lists(st.integers(min_value=1, max_value=900), min_size=1, max_size=6), min_size=1, max_size=12),
    seed=st.integers(min_value=0, max_value=10**6),
)
@settings(max_examples=60)
def test_a_power_cut_takes_nothing_that_was_acknowledged(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]], seed: int
) -> None:
    """Acknowledged records survive in order, whatever a disk does to unsynced sectors and names."""
    assert lost_after_power_cut(tmp_path_factory.mktemp("spool"), groups, LosingDisk(seed)) == 0


def test_without_sync_the_power_cut_test_goes_red(tmp_path: Path) -> None:
    """Negative control: the same check fails with a disk that only pretends to sync."""
    lost = 0
    for seed in range(5):
        (tmp_path / str(seed)).mkdir()
        lost += lost_after_power_cut(tmp_path / str(seed), [[500]] * 20, LosingDisk(seed, honest=False))
    assert lost > 0


def lost_after_power_cut(directory: Path, groups: list[list[int]], disk: LosingDisk) -> int:
    """Return how many acknowledged records are unreadable after a power cut during one more commit."""
    journal = SegmentWriter(directory, disk=disk, segment_bytes=SEGMENT)
    acknowledged: list[bytes] = []

    def sized(size: int) -> Callable[[int], bytes]:
        return lambda sequence: sequence.to_bytes(8, "little") * (1 + size // 8)

    for group in groups:
        outcomes = journal.commit([sized(size) for size in group])
        for size, outcome in zip(group, outcomes, strict=True):
            assert isinstance(outcome, int)
            acknowledged.append(sized(size)(outcome))
    disk.sync = lambda fd: (_ for _ in ()).throw(OSError("power"))  # type: ignore[method-assign]
    disk.truncate = lambda fd, size: None  # type: ignore[method-assign]
    journal.commit([sized(size) for size in groups[-1]])
    disk.power_cut()
    readable = read_all(directory)
    numbers = [int.from_bytes(payload[:8], "little") for payload in readable]
    assert numbers == sorted(set(numbers)), "out of order"
    return len(set(acknowledged) - set(readable))
