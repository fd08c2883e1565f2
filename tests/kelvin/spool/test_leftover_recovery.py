"""Leftover records of a dead process are shipped and removed. Those of a live process are left alone."""

import errno
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kelvin.contracts.errors import Refused, Unavailable
from kelvin.spool import segment_reader
from kelvin.spool.frame import encode_frame
from kelvin.spool.inspection import frames_after, unshipped
from kelvin.spool.leftover_recovery import RecoveredSource, leftover_records, list_spools, recover
from kelvin.spool.segment_disk import segment_name, segments
from kelvin.spool.segment_reader import DAMAGED, SegmentReader, remove_segment
from kelvin.spool.shipper import Post
from kelvin.spool.source_directory import SourceDirectory, has_owner, sources
from kelvin.spool.spool import Spool
from tests.kelvin.spool.test_segment_writer import make


def leftovers(directory: Path) -> list[str]:
    """Return the sources without a live owner."""
    return [source for source in sources(directory) if not has_owner(directory, source)]


def leave(root: Path, source: str, records: int, size: int = 10) -> None:
    """Write records and close without shipping, as a killed process would."""
    spool = Spool.open(root, source, segment_bytes=4096)
    for _ in range(records):
        spool.append_blocking(make("x" * size))
    spool.close()


class Receiver:
    """A receiver that collects records by source."""

    def __init__(self) -> None:
        self.taken: dict[str, list[bytes]] = {}
        self.away = False

    def post_for(self, source: str) -> Post | None:
        """Return a post for `source`, or None for sources that begin with "other"."""
        if source.startswith("other"):
            return None

        async def post(records: Sequence[bytes]) -> None:
            if self.away:
                raise Refused(Unavailable("control plane"))
            self.taken.setdefault(source, []).extend(records)

        return post


async def test_dead_sources_are_shipped_and_removed(tmp_path: Path) -> None:
    """Each dead source is shipped once, complete and in order. Live sources and unknown ones stay."""
    leave(tmp_path, "dead-1", 3)
    leave(tmp_path, "dead-2", 40, size=500)
    leave(tmp_path, "other-1", 1)
    (tmp_path / ".new-abandoned").mkdir()
    (tmp_path / "a file").touch()
    live = Spool.open(tmp_path, "live-1")
    live.append_blocking(make("x"))
    assert leftovers(tmp_path) == ["dead-1", "dead-2", "other-1"]
    receiver = Receiver()
    report = await recover(tmp_path, receiver.post_for)
    assert report == [RecoveredSource("dead-1", 3, 0, 0), RecoveredSource("dead-2", 40, 0, 0)]
    assert receiver.taken["dead-2"] == [make("x" * 500)(sequence) for sequence in range(1, 41)]
    assert leftovers(tmp_path) == ["other-1"]
    assert await recover(tmp_path, receiver.post_for) == []
    assert live.append_blocking(make("still here")) == 2
    live.close()


async def test_a_receiver_that_is_away_leaves_everything(tmp_path: Path) -> None:
    """The next call ships the records."""
    leave(tmp_path, "dead-1", 3)
    receiver = Receiver()
    receiver.away = True
    assert await recover(tmp_path, receiver.post_for) == [RecoveredSource("dead-1", 0, 0, 3)]
    receiver.away = False
    assert await recover(tmp_path, receiver.post_for) == [RecoveredSource("dead-1", 3, 0, 0)]
    assert list(tmp_path.iterdir()) == []


async def test_only_what_was_not_acknowledged_is_shipped(tmp_path: Path) -> None:
    """The position of the dead process is used."""
    spool = Spool.open(tmp_path, "dead-1")
    for _ in range(5):
        spool.append_blocking(make("x"))
    spool.tail.acknowledge(3)
    spool.close()
    receiver = Receiver()
    await recover(tmp_path, receiver.post_for)
    assert receiver.taken["dead-1"] == [b"4:x", b"5:x"]


async def test_a_damaged_position_only_means_repeats(tmp_path: Path) -> None:
    """All remaining records are shipped again, and the receiver ignores repeats."""
    spool = Spool.open(tmp_path, "dead-1")
    for _ in range(5):
        spool.append_blocking(make("x"))
    spool.tail.acknowledge(3)
    spool.close()
    position = tmp_path / "dead-1" / "position"
    position.write_bytes(position.read_bytes()[:-1] + b"!")
    receiver = Receiver()
    await recover(tmp_path, receiver.post_for)
    assert len(receiver.taken["dead-1"]) == 5


def flip(path: Path, offset: int) -> bytes:
    """Flip one byte of the file and return the damaged content."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)
    return bytes(content)


async def test_a_hole_is_counted_and_the_rest_is_shipped(tmp_path: Path) -> None:
    """A damaged byte in a middle segment costs one record. The segment is kept."""
    leave(tmp_path, "dead-1", 20, size=500)
    home = tmp_path / "dead-1"
    second = segments(home)[1]
    content = flip(home / segment_name(second), 700)
    receiver = Receiver()
    (report,) = await recover(tmp_path, receiver.post_for)
    assert (report.shipped, report.lost, report.remaining) == (19, 1, 0)
    numbers = [int(record.split(b":")[0]) for record in receiver.taken["dead-1"]]
    assert numbers == [*range(1, second + 1), *range(second + 2, 21)]
    assert [(path.name, path.read_bytes()) for path in home.iterdir()] == [
        (segment_name(second) + ".damaged", content),
    ]


@pytest.mark.parametrize("part", [pytest.param(at, id=f"byte {at} of the frame") for at in (0, 3, 4, 8, 16, 20)])
async def test_damage_in_the_last_segment_is_counted_and_kept(tmp_path: Path, part: int) -> None:
    """With the third of five records damaged, four are shipped, one is counted as lost, and the bytes are kept."""
    leave(tmp_path, "dead-1", 5)
    home = tmp_path / "dead-1"
    frame_bytes = len(encode_frame(1, make("x" * 10)(1)))
    content = flip(home / segment_name(1), 2 * frame_bytes + part)
    assert [frame.sequence for frame in frames_after(home, 0)] == [1, 2, 4, 5]
    receiver = Receiver()
    receiver.away = True
    assert await recover(tmp_path, receiver.post_for) == [RecoveredSource("dead-1", 0, 0, 5)]
    receiver.away = False
    assert await recover(tmp_path, receiver.post_for) == [RecoveredSource("dead-1", 4, 1, 0)]
    assert receiver.taken["dead-1"] == [make("x" * 10)(sequence) for sequence in (1, 2, 4, 5)]
    assert [(path.name, path.read_bytes()) for path in home.iterdir()] == [(segment_name(1) + ".damaged", content)]
    assert await recover(tmp_path, receiver.post_for) == []
    assert len(list(home.iterdir())) == 1


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSPC, errno.EMLINK])
async def test_damaged_segment_is_kept_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The records after the damage are shipped too."""

    def link(source: Path, *_: object) -> None:
        raise OSError(code, os.strerror(code), str(source))

    monkeypatch.setattr(os, "link", link)
    leave(tmp_path, "dead-1", 5)
    home = tmp_path / "dead-1"
    content = flip(home / segment_name(1), 2 * len(encode_frame(1, make("x" * 10)(1))))
    receiver = Receiver()
    assert await recover(tmp_path, receiver.post_for) == [RecoveredSource("dead-1", 4, 1, 0)]
    assert receiver.taken["dead-1"] == [make("x" * 10)(sequence) for sequence in (1, 2, 4, 5)]
    assert kept_in(home) == {segment_name(1) + ".damaged": content}


@pytest.mark.parametrize("segments_bytes", [pytest.param(4096, id="three segments"), pytest.param(1 << 20, id="one")])
async def test_a_segment_that_can_be_neither_removed_nor_kept_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, segments_bytes: int
) -> None:
    """On a read-only disk, all readable records are shipped once and nothing is lost."""
    spool = Spool.open(tmp_path, "dead-1", segment_bytes=segments_bytes)
    for _ in range(20):
        spool.append_blocking(make("x" * 500))
    spool.close()
    home = tmp_path / "dead-1"
    content = flip(home / segment_name(1), 700)
    rename = Path.rename

    def refusing(path: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "rename", refusing)
    receiver = Receiver()
    assert await recover(tmp_path, receiver.post_for) == [RecoveredSource("dead-1", 19, 1, 0)]
    assert (home / segment_name(1)).read_bytes() == content
    assert "a shipped spool can't be removed" in caplog.messages
    monkeypatch.setattr(Path, "rename", rename)
    assert await recover(tmp_path, receiver.post_for) == [RecoveredSource("dead-1", 0, 0, 0)]
    assert len(receiver.taken["dead-1"]) == 19
    assert kept_in(home) == {segment_name(1) + ".damaged": content}


def kept_in(home: Path) -> dict[str, bytes]:
    """Return the content of every file of a source."""
    return {path.name: path.read_bytes() for path in home.iterdir()}


WHOLE = b"".join(encode_frame(sequence, b"%d" % sequence) for sequence in range(1, 5))
FRAME_BYTES = len(WHOLE) // 4


@pytest.mark.parametrize(
    ("segment", "shipped", "offset"),
    [
        pytest.param(bytes(FRAME_BYTES - 1) + b"!" + WHOLE[FRAME_BYTES:-1], 2, 0, id="the first and the last record"),
        pytest.param(WHOLE[:-1] + b"!", 3, 3 * FRAME_BYTES, id="the last record"),
        pytest.param(WHOLE[:-1], 3, 3 * FRAME_BYTES, id="the last record is torn"),
        pytest.param(WHOLE[:-1] + b"!" + bytes(4096), 3, 3 * FRAME_BYTES, id="the last record, in reserved space"),
        pytest.param(WHOLE + bytes(512) + b"!" + bytes(64), 4, 4 * FRAME_BYTES, id="a sector behind a lost one"),
        pytest.param(b"!" * 4096, 0, 0, id="every byte"),
        pytest.param(WHOLE.translate(bytes(255 - byte for byte in range(256))), 0, 0, id="every record"),
        pytest.param(b"!", 0, 0, id="one byte"),
    ],
)
async def test_unreadable_leftovers_are_kept_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, segment: bytes, shipped: int, offset: int
) -> None:
    """A torn write can't be told from damage, so the file is kept. It doesn't delay later recoveries or backups."""
    home = tmp_path / "dead-1"
    home.mkdir()
    (home / segment_name(1)).write_bytes(segment)
    receiver = Receiver()
    (report,) = await recover(tmp_path, receiver.post_for)
    assert (report.shipped, report.remaining) == (shipped, 0)
    assert kept_in(home) == {segment_name(1) + ".damaged": segment}
    (line,) = [record for record in caplog.records if "torn by a power cut, or damaged" in record.message]
    named = vars(line)
    assert (named["source"], named["segment"]) == ("dead-1", segment_name(1))
    assert (named["offset"], named["bytes"]) == (offset, len(segment.rstrip(b"\0")) - offset)
    caplog.clear()
    assert await recover(tmp_path, receiver.post_for) == []
    assert list(unshipped(tmp_path)) == []
    assert list(leftover_records(tmp_path, lambda _: True)) == []
    assert dict(list_spools(tmp_path)) == {"dead-1": (0, 0)}
    assert caplog.records == []
    assert kept_in(home) == {segment_name(1) + ".damaged": segment}


@given(
    sizes=st.lists(st.integers(min_value=1, max_value=1500), min_size=1, max_size=20),
    flips=st.lists(st.integers(min_value=0), max_size=4),
    acknowledged=st.integers(min_value=0, max_value=20),
)
@settings(max_examples=60)
async def test_damage_anywhere_loses_no_record(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], flips: list[int], acknowledged: int
) -> None:
    """Each record is either shipped unchanged or in a kept file. Without damage, no file is kept."""
    root = tmp_path_factory.mktemp("spool")
    spool = Spool.open(root, "dead-1", segment_bytes=4096)
    for size in sizes:
        spool.append_blocking(make("x" * size))
    spool.tail.acknowledge(min(acknowledged, len(sizes) - 1))
    spool.close()
    home = root / "dead-1"
    damaged: dict[str, bytes] = {}
    for at in flips:
        paths = [home / segment_name(first) for first in segments(home)]
        path = paths[at % len(paths)]
        if path.name not in damaged:
            damaged[path.name] = flip(path, at % path.stat().st_size)
    receiver = Receiver()
    await recover(root, receiver.post_for)
    taken = receiver.taken.get("dead-1", [])
    assert set(taken) <= {make("x" * size)(sequence) for sequence, size in enumerate(sizes, 1)}
    assert (kept_in(home) if damaged else list(root.iterdir())) == (
        {name + ".damaged": content for name, content in damaged.items()} if damaged else []
    )
    assert await recover(root, receiver.post_for) == []


def test_reopened_spool_overwrites_nothing_unreadable(tmp_path: Path) -> None:
    """Kept files aren't overwritten, even if the writer begins the same segment again and it is unreadable again."""
    spool_of = partial(Spool.open, tmp_path, "journal")
    home = tmp_path / "journal"
    first, second = b"!" * 100, b"?" * 100
    home.mkdir()
    for content in (first, second):
        (home / segment_name(1)).write_bytes(content)
        spool = spool_of()
        assert spool.append_blocking(make("x")) == 1
        spool.close()
    files = kept_in(home)
    assert files[segment_name(1) + ".damaged"] == first
    assert files[segment_name(1) + ".2.damaged"] == second


def test_torn_end_before_new_records_is_kept(tmp_path: Path) -> None:
    """The torn bytes may have been records with sequences that the writer then used again, so they are kept."""
    leave(tmp_path, "journal", 3)
    home = tmp_path / "journal"
    segment = home / segment_name(1)
    content = segment.read_bytes() + b"torn"
    segment.write_bytes(content)
    spool = Spool.open(tmp_path, "journal")
    assert spool.append_blocking(make("x")) == 4
    spool.tail.acknowledge(3)
    spool.close()
    assert segments(home) == [4]
    assert kept_in(home)[segment_name(1) + ".damaged"] == content


def test_records_behind_damage_are_shipped_by_a_live_spool(tmp_path: Path) -> None:
    """The position may be before, in or after the hole. A hole doesn't end a batch."""
    spool = Spool.open(tmp_path, "live-1", recent_bytes=0)
    for _ in range(5):
        spool.append_blocking(make("x"))
    flip(spool.path / segment_name(1), 2 * len(encode_frame(1, b"1:x")) + 17)
    for before, shipped, skipped in ((0, (1, 2, 4, 5), 1), (2, (4, 5), 1), (3, (4, 5), 0), (4, (5,), 0)):
        spool.tail.acknowledge(before)
        batch = spool.tail.read(spool.committed, 100, 1000)
        assert batch is not None
        assert batch.payloads == tuple(make("x")(sequence) for sequence in shipped)
        assert batch.skipped == skipped
    spool.close()


def test_live_spool_keeps_damaged_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undamaged segments aren't read again before removal, because that would slow requests by a few per cent."""
    read_again: list[int] = []

    def record_and_remove(directory: Path, first: int) -> None:
        read_again.append(first)
        remove_segment(directory, first)

    monkeypatch.setattr(segment_reader, "remove_segment", record_and_remove)
    spool = Spool.open(tmp_path, "live-1", segment_bytes=4096, recent_bytes=0)
    for _ in range(12):
        spool.append_blocking(make("x" * 1000))
    firsts = segments(spool.path)
    flip(spool.path / segment_name(firsts[1]), 500)
    while (batch := spool.tail.read(spool.committed, 1, 4096)) is not None:
        spool.tail.acknowledge(batch.last)
    assert read_again == firsts[1:2]
    assert sorted(path.name for path in spool.path.glob("*.seg*")) == sorted(
        (segment_name(firsts[1]) + DAMAGED, segment_name(firsts[-1]))
    )
    spool.close()


@pytest.mark.parametrize(
    "reserved", [pytest.param(0, id="a closed segment"), pytest.param(1 << 19, id="with reserved space")]
)
async def test_a_segment_with_much_damage_is_shipped_in_full_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reserved: int
) -> None:
    """With every second of 4,000 records damaged, there are only four posts and four log lines."""
    frames = [bytearray(encode_frame(sequence, b"%d" % sequence)) for sequence in range(1, 4001)]
    for frame in frames[1::2]:
        frame[-1] ^= 0xFF
    (tmp_path / "dead-1").mkdir()
    (tmp_path / "dead-1" / segment_name(1)).write_bytes(b"".join(frames) + bytes(reserved))
    posts: list[Sequence[bytes]] = []

    async def post(records: Sequence[bytes]) -> None:
        posts.append(records)

    # The last record is damaged too. It is after all readable records, so it isn't counted.
    assert await recover(tmp_path, lambda _: post) == [RecoveredSource("dead-1", 2000, 1999, 0)]
    assert [int(record) for records in posts for record in records] == list(range(1, 4000, 2))
    assert len(posts) == 4
    lost = [vars(record) for record in caplog.records if record.message == "records of a spool are lost"]
    assert sum(line["lost"] for line in lost) == 1999
    assert len(lost) == 4
    assert (lost[0]["first"], lost[-1]["last"]) == (2, 3998)


def test_a_hole_that_ends_a_batch_is_counted_once(tmp_path: Path) -> None:
    """A hole is counted once, whether the batch ends by records, by bytes or at the end of a segment."""
    leave(tmp_path, "dead-1", 12, size=1000)  # three segments of four records
    home = tmp_path / "dead-1"
    second = segments(home)[1]
    frame_bytes = len(encode_frame(1, make("x" * 1000)(1)))
    flip(home / segment_name(1), frame_bytes + 20)
    flip(home / segment_name(1), (second - 2) * frame_bytes + 20)
    readable = [sequence for sequence in range(1, 13) if sequence not in (2, second - 1)]
    for max_records, max_bytes in ((1, 10**6), (2, 10**6), (3, 10**6), (500, 1), (500, 2100), (500, 10**6)):
        tail = SegmentReader(home)
        taken: list[bytes] = []
        skipped = 0
        tail.acknowledged = 0
        while (batch := tail.read(12, max_records, max_bytes)) is not None:
            taken += batch.payloads
            skipped += batch.skipped
            tail.acknowledged = batch.last
        assert taken == [make("x" * 1000)(sequence) for sequence in readable]
        assert (skipped, tail.acknowledged) == (2, 12)
        tail.close()


def test_batch_that_ends_with_a_hole_includes_no_later_record(tmp_path: Path) -> None:
    """A read up to a damaged last record doesn't include records that the writer appends later."""
    frames = b"".join(encode_frame(sequence, b"%d" % sequence) for sequence in range(1, 6))
    (tmp_path / segment_name(1)).write_bytes(frames)
    flip(tmp_path / segment_name(1), 3 * FRAME_BYTES - 1)
    (tmp_path / segment_name(6)).write_bytes(encode_frame(6, b"6"))
    tail = SegmentReader(tmp_path)
    for until, shipped, skipped in ((3, (b"1", b"2"), 1), (6, (b"4", b"5", b"6"), 0)):
        batch = tail.read(until, 100, 1000)
        assert batch is not None
        assert (batch.payloads, batch.last, batch.skipped) == (shipped, until, skipped)
        tail.acknowledge(batch.last)
    tail.close()


async def test_a_torn_tail_counts_as_no_loss(tmp_path: Path) -> None:
    """Half a record at the end was most likely torn by a power cut before it was acknowledged."""
    leave(tmp_path, "dead-1", 3)
    segment = tmp_path / "dead-1" / segment_name(1)
    segment.write_bytes(segment.read_bytes() + encode_frame(4, b"x" * 2000)[:-500] + bytes(4096))
    assert await recover(tmp_path, Receiver().post_for) == [RecoveredSource("dead-1", 3, 0, 0)]
    assert [path.name for path in (tmp_path / "dead-1").iterdir()] == [segment_name(1) + ".damaged"]


async def test_two_recoveries_do_not_ship_the_same_source(tmp_path: Path) -> None:
    """A recovery holds the source's lock while it ships."""
    leave(tmp_path, "dead-1", 3)
    home = SourceDirectory.try_lock(tmp_path, "dead-1")
    assert home is not None
    assert leftovers(tmp_path) == []
    assert await recover(tmp_path, Receiver().post_for) == []
    home.close()
    assert leftovers(tmp_path) == ["dead-1"]


async def test_no_directory_is_no_leftover(tmp_path: Path) -> None:
    """A spool directory that doesn't exist yet has no leftovers."""
    assert leftovers(tmp_path / "none") == []
    assert await recover(tmp_path / "none", Receiver().post_for) == []


def test_only_a_live_source_has_an_owner(tmp_path: Path) -> None:
    """A live source has an owner, which the check doesn't disturb. A dead or missing source has none."""
    live = Spool.open(tmp_path, "live-1")
    leave(tmp_path, "dead-1", 1)
    assert [has_owner(tmp_path, source) for source in ("live-1", "dead-1", "never")] == [True, False, False]
    assert leftovers(tmp_path) == ["dead-1"]
    live.close()
    assert not has_owner(tmp_path, "live-1")
