"""Recent records are shipped from memory and older ones from disk, without repeats or losses."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kelvin.spool.frame import encode_frame
from kelvin.spool.recent_records import RecentRecords
from kelvin.spool.spool import Spool
from tests.kelvin.spool.test_segment_writer import make
from tests.kelvin.spool.test_shipper import Receiver, quick, soon


def frames(first: int, *payloads: bytes) -> list[bytes]:
    """Encode frames as a segment writer does."""
    return [encode_frame(sequence, payload) for sequence, payload in enumerate(payloads, first)]


def test_only_what_follows_without_a_gap() -> None:
    """Only records that follow without a gap are returned. Later ones wait until the missing one was read from disk."""
    recent = RecentRecords()
    recent.add(3, frames(3, b"c", b"d"))
    recent.add(7, frames(7, b"g"))
    assert recent.records_after(1, 9) == []
    assert [(frame.sequence, frame.payload) for frame in recent.records_after(2, 9)] == [(3, b"c"), (4, b"d")]
    assert [frame.sequence for frame in recent.records_after(3, 9)] == [4]
    assert [frame.sequence for frame in recent.records_after(2, 1)] == [3]
    assert recent.records_after(2, 0) == recent.records_after(4, 9) == []
    recent.forget(6)
    assert [frame.payload for frame in recent.records_after(6, 9)] == [b"g"]
    recent.check_integrity()


@given(sizes=st.lists(st.integers(1, 400), max_size=60), limit=st.integers(0, 2000), kept=st.integers(0, 60))
def test_recent_records_are_bounded(sizes: list[int], limit: int, kept: int) -> None:
    """The memory bound holds for any sizes and any forgotten records."""
    recent = RecentRecords(limit)
    for sequence, size in enumerate(sizes, 1):
        recent.add(sequence, frames(sequence, b"x" * size))
        recent.forget(sequence - kept)
        recent.check_integrity()


async def test_shipping_what_was_just_committed_reads_no_disk(tmp_path: Path) -> None:
    """All records arrive although their segment is unreadable. `test_shipper.py` has the control."""
    spool, receiver = Spool.open(tmp_path, "a-1", segment_bytes=4096), Receiver(refusals=3)
    for _ in range(3):
        await spool.append(make("x" * 1000))
    for path in spool.path.glob("*.seg"):
        path.write_bytes(bytes(4096))
    assert await quick(spool, receiver).flush(soon())
    assert receiver.first_times() == [make("x" * 1000)(sequence) for sequence in (1, 2, 3)]
    spool.close()


async def test_from_memory_to_the_disk_and_back(tmp_path: Path) -> None:
    """The first batch comes from memory, the next ones from segments on disk, the last ones from memory again."""
    spool = Spool.open(tmp_path, "a-1", segment_bytes=4096, recent_bytes=3500)
    receiver = Receiver()
    for _ in range(12):
        await spool.append(make("x" * 1000))
    shipper = quick(spool, receiver)
    assert await shipper._try_ship()
    assert receiver.batches == [3]
    for _ in range(3):
        await spool.append(make("x" * 1000))
    assert await shipper.flush(soon())
    assert receiver.taken == [make("x" * 1000)(sequence) for sequence in range(1, 16)]
    spool.close()
