"""Append records to preallocated segments in groups: one write and one fdatasync for any number of records.

The core of a spool, without threads or event loops. A commit makes a record durable with the next sequence, or raises
for it and uses the sequence for the next record. So there are no gaps.
"""

import errno
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.spool.frame import encode_frame
from kelvin.spool.recent_records import RecentRecords
from kelvin.spool.segment_disk import SegmentDisk, segment_name, segments
from kelvin.spool.segment_reader import last_unbroken_sequence, remove_segment

log = logging.getLogger(__name__)

Make = Callable[[int], bytes]

SEGMENT_BYTES: Final = 1024 * 1024
LIMIT_BYTES: Final = 1024 * 1024 * 1024


class SegmentWriter:
    """One writer's segments in `directory`, which must exist and belong to this writer alone. Not thread-safe."""

    def __init__(
        self,
        directory: Path,
        *,
        disk: SegmentDisk | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        limit_bytes: int = LIMIT_BYTES,
        recent: RecentRecords | None = None,
    ) -> None:
        """Continue after the last durable record in `directory`. Committed records are added to `recent` too."""
        self._directory = directory
        self._recent = recent
        self._disk = disk or SegmentDisk()
        self._segment_bytes = segment_bytes
        self._limit_bytes = limit_bytes
        self._fd = -1
        self._first = 0
        self._offset = 0
        self.committed = last_unbroken_sequence(directory)  # the last durable sequence

    def __repr__(self) -> str:
        return f"<SegmentWriter {self._directory.name} committed={self.committed}>"

    def commit(self, makes: Sequence[Make]) -> list[int | Exception]:
        """Return one outcome per record, after the last sync: its sequence if it is durable, else its exception.

        Each `make` is called once, with the sequence that its record would get, and returns the record's bytes.
        Exceptions: any that `make` raises, ValueError for a record of illegal size, Refused(Unavailable) if the disk
        fails, Refused(Overloaded) if the backlog is at its limit.
        """
        outcomes: list[int | Exception] = []
        frames: list[bytes] = []
        sequence = self.committed + 1
        for make in makes:
            try:
                frame = encode_frame(sequence, make(sequence))
                if len(frame) > self._segment_bytes:
                    raise ValueError(f"a record of {len(frame)} bytes does not fit a segment")
            except Exception as error:
                outcomes.append(error)
                continue
            frames.append(frame)
            outcomes.append(sequence)
            sequence += 1
        try:
            self._write(frames)
        except OSError as error:
            log.error("the spool's disk fails", extra={"error": repr(error), "source": self._directory.name})
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            failure = Refused(Unavailable("the usage spool (its disk is full)" if is_full else "the usage spool"))
            failure.__cause__ = error
            return self._only_committed(outcomes, failure)
        except Refused as refused:
            return self._only_committed(outcomes, refused)
        return outcomes

    def advance_to(self, sequence: int) -> None:
        """Continue after `sequence`: it was used before, although the disk has lost its record."""
        if sequence > self.committed:
            self.close()
            self.committed = sequence

    def close(self) -> None:
        """Close the segment and free its unused space. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1  # reset first: if closing fails, another file may get the descriptor number
            with suppress(OSError):
                self._disk.truncate(fd, self._offset)
            with suppress(OSError):  # committed records are synced already
                os.close(fd)

    def check_integrity(self) -> None:
        """Assert that the files hold the committed records. For tests."""
        found = last_unbroken_sequence(self._directory)
        assert found == self.committed, f"{self!r}: {found} on disk"
        if self._fd >= 0:
            assert self._first <= self.committed + 1
            assert self._offset <= self._segment_bytes

    def _only_committed(self, outcomes: list[int | Exception], failure: Refused) -> list[int | Exception]:
        return [failure if isinstance(outcome, int) and outcome > self.committed else outcome for outcome in outcomes]

    def _write(self, frames: Sequence[bytes]) -> None:
        """Write groups that fit into a segment. Each is durable, and counted in `committed`, before the next."""
        group: list[bytes] = []
        size = 0
        for frame in frames:
            if group and self._used() + size + len(frame) > self._segment_bytes:
                self._write_group(group, size)
                group, size = [], 0
            if not group and self._fd >= 0 and self._offset + len(frame) > self._segment_bytes:
                self.close()
            group.append(frame)
            size += len(frame)
        if group:
            self._write_group(group, size)

    def _used(self) -> int:
        return self._offset if self._fd >= 0 else 0

    def _write_group(self, group: Sequence[bytes], size: int) -> None:
        fresh = self._fd < 0
        if fresh:
            self._begin_segment()
        try:
            self._disk.write(self._fd, b"".join(group), self._offset)
            self._disk.sync(self._fd)
            if fresh:
                self._disk.sync_directory(self._directory)
        except BaseException:
            self._abandon_segment()
            raise
        self._offset += size
        if self._recent is not None:
            self._recent.add(self.committed + 1, group)
        self.committed += len(group)

    def _begin_segment(self) -> None:
        # The limit is on reserved space, so each segment counts with its full size.
        if (len(segments(self._directory)) + 1) * self._segment_bytes > self._limit_bytes:
            raise Refused(Overloaded("the usage spool", self._limit_bytes, 1.0, "bytes"))
        # An existing segment of that name begins with unreadable bytes. It is kept for an operator.
        remove_segment(self._directory, self.committed + 1)
        self._fd = self._disk.create(self._directory / segment_name(self.committed + 1), self._segment_bytes)
        self._first, self._offset = self.committed + 1, 0

    def _abandon_segment(self) -> None:
        """Never write to this segment again: after a failed write or sync, the state of its tail is unknown. A repeated
        sync may succeed although nothing has reached the disk.
        """
        holds_records = self._first <= self.committed
        self.close()
        if not holds_records:
            with suppress(OSError):
                (self._directory / segment_name(self._first)).unlink(missing_ok=True)
