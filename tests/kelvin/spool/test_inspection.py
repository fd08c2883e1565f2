"""Inspecting a spool shows its unshipped records while its owner and shipper work, and changes nothing."""

from pathlib import Path

from kelvin.spool.frame import encode_frame
from kelvin.spool.inspection import frames_after, unshipped
from kelvin.spool.segment_disk import segment_name, segments
from kelvin.spool.segment_reader import SegmentReader, encode_position
from kelvin.spool.segment_writer import SegmentWriter


def _commit(journal: SegmentWriter, *payloads: bytes) -> None:
    outcomes = journal.commit([lambda _, payload=payload: payload for payload in payloads])  # type: ignore[misc]
    assert all(isinstance(outcome, int) for outcome in outcomes)


def _seen(directory: Path, after: int = 0) -> list[tuple[int, bytes]]:
    return [(frame.sequence, frame.payload) for frame in frames_after(directory, after)]


def test_committed_records_are_read_in_order(tmp_path: Path) -> None:
    """Records are read across segments, from live and closed spools, starting after a given sequence."""
    journal = SegmentWriter(tmp_path, segment_bytes=64)
    for number in range(1, 10):
        _commit(journal, b"%d" % number * 10)
    assert len(segments(tmp_path)) > 2
    assert _seen(tmp_path) == [(number, b"%d" % number * 10) for number in range(1, 10)]
    assert _seen(tmp_path, 7) == [(8, b"8" * 10), (9, b"9" * 10)]
    journal.close()
    assert len(_seen(tmp_path)) == 9


def test_a_torn_tail_is_no_record(tmp_path: Path) -> None:
    """Half a frame and preallocated zeros are not read."""
    whole = encode_frame(1, b"whole") + encode_frame(2, b"cut")[:-1]
    (tmp_path / segment_name(1)).write_bytes(whole + bytes(64))
    assert _seen(tmp_path) == [(1, b"whole")]


def test_an_abandoned_tail_gives_way_to_the_next_segment(tmp_path: Path) -> None:
    """A failed commit may leave a record under a sequence that a later record got."""
    (tmp_path / segment_name(1)).write_bytes(encode_frame(1, b"good") + encode_frame(2, b"refused"))
    (tmp_path / segment_name(2)).write_bytes(encode_frame(2, b"taken"))
    assert _seen(tmp_path) == [(1, b"good"), (2, b"taken")]


def test_a_hole_shows_as_a_jump(tmp_path: Path) -> None:
    """A hole shows as a jump in the sequences."""
    (tmp_path / segment_name(1)).write_bytes(encode_frame(1, b"a"))
    (tmp_path / segment_name(4)).write_bytes(encode_frame(4, b"d"))
    assert [sequence for sequence, _ in _seen(tmp_path)] == [1, 4]


def test_only_what_was_not_shipped_waits(tmp_path: Path) -> None:
    """Unshipped records of every source are found. Other files and incomplete sources are skipped."""
    for source, acknowledged in (("a", 1), ("b", 0), ("c", 2)):
        (tmp_path / source).mkdir()
        (tmp_path / source / segment_name(1)).write_bytes(encode_frame(1, b"1") + encode_frame(2, b"2"))
        (tmp_path / source / "position").write_bytes(encode_position(acknowledged))
    (tmp_path / ".new-x").mkdir()
    (tmp_path / "file").touch()
    found = [(source, frame.sequence) for source, frame in unshipped(tmp_path)]
    assert found == [("a", 2), ("b", 1), ("b", 2)]


def test_a_directory_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    """The directory was shipped and removed in the meantime."""
    assert list(frames_after(tmp_path / "gone", 0)) == []
    assert list(unshipped(tmp_path / "gone")) == []


def test_inspection_changes_nothing(tmp_path: Path) -> None:
    """The same records can be shipped afterwards."""
    journal = SegmentWriter(tmp_path)
    _commit(journal, b"a", b"b")
    assert len(_seen(tmp_path)) == 2
    tail = SegmentReader(tmp_path)
    batch = tail.read(2, 10, 1000)
    assert batch is not None
    assert batch.payloads == (b"a", b"b")
    tail.close()
    journal.close()
