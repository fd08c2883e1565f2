"""A segment is removed once all its records are acknowledged, and not earlier."""

from pathlib import Path

import pytest

from kelvin.spool.segment_disk import segments
from kelvin.spool.segment_reader import SegmentReader, last_sequence, read_position
from kelvin.spool.segment_writer import SegmentWriter
from tests.kelvin.spool.test_segment_writer import make


def three_segments(directory: Path) -> None:
    """Write three segments with records [1, 2], [3, 4] and [5], closing the writer between them."""
    for count in (2, 2, 1):
        journal = SegmentWriter(directory)
        journal.commit([make("x")] * count)
        journal.close()


@pytest.mark.parametrize(
    ("last", "kept"),
    [
        pytest.param(0, [1, 3, 5], id="nothing acknowledged"),
        pytest.param(1, [1, 3, 5], id="the first of two"),
        pytest.param(2, [3, 5], id="all of the first segment"),
        pytest.param(3, [3, 5], id="the first of the second"),
        pytest.param(4, [5], id="all of the second"),
        pytest.param(5, [5], id="the newest is the writer's and stays"),
    ],
)
def test_acknowledged_records_are_skipped(tmp_path: Path, last: int, kept: list[int]) -> None:
    """Reading continues after the acknowledged record, in this process and in the next one."""
    three_segments(tmp_path)
    tail = SegmentReader(tmp_path)
    tail.acknowledge(last)
    tail.acknowledge(last - 1)  # a late reply with an older sequence
    assert segments(tmp_path) == kept
    assert read_position(tmp_path) == last
    for reader in (tail, SegmentReader(tmp_path)):
        batch = reader.read(last_sequence(tmp_path), 100, 10**6)
        payloads = () if batch is None else batch.payloads
        assert payloads == tuple(make("x")(sequence) for sequence in range(last + 1, 6))
    tail.close()
    tail.close()


def test_reading_is_bounded_by_what_is_durable_and_by_the_batch(tmp_path: Path) -> None:
    """A batch ends at `until` and at its limits of records and bytes, but has at least one record."""
    three_segments(tmp_path)
    tail = SegmentReader(tmp_path)
    for until, records, size, want in ((0, 9, 99, 0), (4, 9, 99, 4), (5, 3, 99, 3), (5, 9, 6, 2), (5, 9, 1, 1)):
        batch = tail.read(until, records, size)
        assert (0 if batch is None else len(batch.payloads)) == want
        assert batch is None or (batch.last, batch.skipped) == (want, 0)
