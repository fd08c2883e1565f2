"""Read a spool's records in order, live or left over, and store the sequence that the receiver has acknowledged.

A record is identified by its sequence. If a segment is named by the next sequence, that segment wins over further
frames in the segment before it. A writer whose commit failed abandons a segment, and frames that remain there were
never acknowledged.

Damaged records are skipped and counted. A segment with unreadable bytes is never deleted: `remove_segment` renames it
(`DAMAGED`) for an operator.
"""

import logging
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Final
from zlib import crc32

from kelvin.spool.frame import MAX_SEQUENCE, Frame, decode_frame, find_frame
from kelvin.spool.recent_records import RecentRecords
from kelvin.spool.segment_disk import segment_name, segments

log = logging.getLogger(__name__)

POSITION: Final = "position"
DAMAGED: Final = ".damaged"  # suffix of a segment that is kept for an operator
_POSITION: Final = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Records in order. The batch covers every sequence up to `last`; `skipped` of them are lost."""

    payloads: tuple[bytes, ...]
    last: int
    skipped: int


class SegmentReader:
    """Reads records after the acknowledged position. One per spool; not thread-safe."""

    def __init__(self, directory: Path, recent: RecentRecords | None = None) -> None:
        self.directory = directory
        self._recent = recent or RecentRecords()  # empty for a spool without a writer
        # Segments that may have unreadable bytes; None: all. A live writer knows that its own segments are readable.
        self._suspect = None if recent is None else set(segments(directory))
        self.acknowledged = read_position(directory)
        self._position_fd = -1
        self._segment = 0  # first sequence of the segment in `_content`
        self._content = b""
        self._offset = 0  # offset in `_content` of the frame after sequence `_offset_after`
        self._offset_after = -1
        self._is_fresh = False  # `_content` was read during this `read`, so it has everything durable

    def __repr__(self) -> str:
        return f"<SegmentReader {self.directory.name} acknowledged={self.acknowledged}>"

    def read(self, last_readable: int, max_records: int, max_bytes: int) -> RecordBatch | None:
        """Return the records after the acknowledged one up to `last_readable`, or None. At least one, however large.
        Another read without an acknowledgement returns the same records, and perhaps more. Raises OSError.
        """
        payloads: list[bytes] = []
        size, sequence, skipped = 0, self.acknowledged, 0
        first_lost = last_lost = 0
        self._is_fresh = False
        for recent_frame in self._recent.records_after(sequence, min(max_records, last_readable - sequence)):
            if payloads and size + len(recent_frame.payload) > max_bytes:
                break
            payloads.append(recent_frame.payload)
            size += len(recent_frame.payload)
            sequence = recent_frame.sequence
        if payloads:
            self._segment, self._content = 0, b""  # the loaded segment may be far behind
            return RecordBatch(tuple(payloads), sequence, skipped)
        while len(payloads) < max_records and sequence < last_readable:
            frame = self._frame_after(sequence, last_readable)
            if frame is not None and payloads and size + len(frame.payload) > max_bytes:
                break
            beyond = self._segment_beyond(sequence) if frame is None else frame.sequence
            if beyond is None:
                break
            beyond = min(beyond, last_readable + 1)  # records after `last_readable` were not searched
            if beyond > sequence + 1:
                if self._suspect is not None:
                    self._suspect.update(first for first in segments(self.directory) if first < beyond)
                skipped += beyond - 1 - sequence
                first_lost, last_lost = first_lost or sequence + 1, beyond - 1
                sequence = last_lost
            if frame is None:
                continue
            payloads.append(frame.payload)
            size += len(frame.payload)
            sequence = frame.sequence
            self._offset, self._offset_after = frame.end, sequence
        if skipped:  # one log line per batch, as every record may be damaged
            lost = {"source": self.directory.name, "first": first_lost, "last": last_lost, "lost": skipped}
            log.error("records of a spool are lost", extra=lost)
        return RecordBatch(tuple(payloads), sequence, skipped) if payloads else None

    def acknowledge(self, last: int) -> None:
        """Store that the receiver has everything up to `last`, and remove segments with only such records."""
        if last <= self.acknowledged:
            return
        self.acknowledged = last
        self._recent.forget(last)
        self._write_position(last)
        firsts = segments(self.directory)
        for first, following in pairwise(firsts):
            if following > last + 1:
                break
            try:
                if self._suspect is None or first in self._suspect:
                    remove_segment(self.directory, first)
                else:
                    (self.directory / segment_name(first)).unlink(missing_ok=True)
            except OSError as error:  # the segment stays until the next acknowledgement; shipping continues
                stays = {"source": self.directory.name, "segment": segment_name(first), "error": repr(error)}
                log.error("a shipped segment can't be removed", extra=stays)

    def close(self) -> None:
        """Close the position file. Idempotent."""
        if self._position_fd >= 0:
            fd, self._position_fd = self._position_fd, -1
            with suppress(OSError):  # the position is a hint
                os.close(fd)

    def _write_position(self, last: int) -> None:
        # No sync: if a power cut undoes the write, records are posted twice, which is harmless.
        if self._position_fd < 0:
            self._position_fd = os.open(self.directory / POSITION, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self._position_fd, encode_position(last), 0)

    def _frame_after(self, sequence: int, last_readable: int) -> Frame | None:
        """Return the first whole frame after `sequence`, up to `last_readable`. Searches one segment only."""
        next_sequence = sequence + 1
        if self._segment != next_sequence and (self.directory / segment_name(next_sequence)).exists():
            self._load(next_sequence)
        elif not 0 < self._segment <= next_sequence:  # nothing is loaded, or an unacknowledged batch is read again
            older = [first for first in segments(self.directory) if first <= next_sequence]
            if not older:
                return None
            self._load(older[-1])
        if self._offset_after != sequence:
            self._seek(next_sequence)
        frame = decode_frame(self._content, self._offset)
        if frame is not None and frame.sequence == next_sequence:
            return frame
        if not self._is_fresh:  # the frame may have been written since
            self._reload()
        beyond = self._segment_beyond(sequence)
        last = last_readable if beyond is None else min(last_readable, beyond - 1)
        return find_frame(self._content, self._offset, next_sequence, last)

    def _seek(self, sequence: int) -> None:
        self._reload()
        self._offset, self._offset_after = 0, sequence - 1
        first = self._segment
        while first < sequence and (frame := find_frame(self._content, self._offset, first, sequence - 1)) is not None:
            self._offset, first = frame.end, frame.sequence + 1

    def _load(self, first: int) -> None:
        self._segment, self._offset, self._offset_after = first, 0, first - 1
        self._reload()

    def _reload(self) -> None:
        self._is_fresh = True
        try:
            self._content = (self.directory / segment_name(self._segment)).read_bytes()
        except FileNotFoundError:
            self._content = b""

    def _segment_beyond(self, sequence: int) -> int | None:
        """Return the first sequence of the next segment after a gap, or None."""
        return next((first for first in segments(self.directory) if first > sequence + 1), None)


def encode_position(last: int) -> bytes:
    """Return the content of the position file. Its length is constant, so an overwrite needs no room on a full disk."""
    return _POSITION.pack(last, crc32(last.to_bytes(8, "little")))


def read_position(directory: Path) -> int:
    """Return the last acknowledged sequence, 0 if its file is missing or damaged."""
    return try_read_position(directory / POSITION) or 0


def try_read_position(path: Path) -> int | None:
    """Return the sequence in a file of `encode_position`, None if it is missing or damaged."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) != _POSITION.size:
        return None
    last, checksum = _POSITION.unpack(raw)
    return int(last) if crc32(raw[:8]) == checksum else None


def last_sequence(directory: Path) -> int:
    """Return the sequence of the last readable record, or the acknowledged one if that is later."""
    content, found = _newest_segment(directory)
    offset = 0
    while (frame := find_frame(content, offset, found + 1, MAX_SEQUENCE)) is not None:
        offset, found = frame.end, frame.sequence
    return max(read_position(directory), found)


def last_unbroken_sequence(directory: Path) -> int:
    """Return the sequence after which a writer continues: as `last_sequence`, but only up to the newest segment's first
    damage.

    A power cut can tear a group of records in the middle. None of them was acknowledged, so their numbers are free.
    """
    content, before = _newest_segment(directory)
    return max(read_position(directory), _unbroken(content, before)[1])


def remove_segment(directory: Path, first: int) -> None:
    """Delete a segment that is no longer needed. If it has unreadable bytes, rename it (`DAMAGED`) and log that
    instead.

    A power cut may have torn those bytes before they were reported as durable. Or they are damaged records. Only an
    operator can tell. A rename needs neither free space nor hard links. Raises OSError.
    """
    path = directory / segment_name(first)
    offset = 0
    try:
        content = path.read_bytes()
        offset, _ = _unbroken(content, first - 1)
        unread = len(content[offset:].rstrip(b"\0"))
    except FileNotFoundError:
        return
    except OSError:  # the disk can't read it
        unread = path.stat().st_size
    if not unread:
        path.unlink(missing_ok=True)
        return
    kept = path.with_name(path.name + DAMAGED)
    # A writer that begins the same segment again uses its name twice.
    names = (path.with_name(f"{path.name}.{number}{DAMAGED}") for number in count(2))
    while kept.exists():
        kept = next(names)
    path.rename(kept)
    log.warning(
        "a segment has bytes that can't be read: torn by a power cut, or damaged; it is kept",
        extra={"source": directory.name, "segment": path.name, "kept": kept.name, "offset": offset, "bytes": unread},
    )


def _unbroken(content: bytes, before: int) -> tuple[int, int]:
    """Return the end of the whole frames that follow `before` without a gap, and the last one's sequence."""
    offset = 0
    while (frame := decode_frame(content, offset)) is not None and frame.sequence == before + 1:
        offset, before = frame.end, frame.sequence
    return offset, before


def _newest_segment(directory: Path) -> tuple[bytes, int]:
    """Return the content of the newest segment, and the sequence before it. The segment's name proves that everything
    before it was committed, even if it holds nothing readable.
    """
    firsts = segments(directory)
    return ((directory / segment_name(firsts[-1])).read_bytes(), firsts[-1] - 1) if firsts else (b"", 0)
