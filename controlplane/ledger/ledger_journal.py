"""Write and read the ledger's journal: a copy of all entries, in order, durable before a sender may delete its records.

The journal lies with the backups, on another disk if the operator chose one. A backup and the journal after it restore
the ledger up to the last acknowledged record. Frames and segments are those of the spool.

Entries are written before their transaction commits. Marks tell a restore which of them count:

- The transaction stores the journal's position in the database. If it did not commit, a `DroppedMark` is written after
  its entries before anything else, and they are not replayed.
- The journal notes each position that the database was seen to have (the file `committed`). A database with a lower
  position is a copy that was put back by hand. A database without any position that was not restored is new. Both are
  refused, because they lack committed entries.
- Each journal has a number, which the database stores with the position, because positions of two journals can't be
  compared.
- If a journal is used again after another one, or after none, it gets a `_GAP` mark: it lacks the entries made
  meanwhile, and a restore from a backup before the mark reports that.

Entries without a mark count as committed. So do those in journals of older programs, which have no marks, and those of
the last transaction before a disk was lost.
"""

import logging
import os
import secrets
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from controlplane.ledger.usage_batches import R, Unreadable, split
from kelvin.contracts.accounting.billing_reports import BillingReport
from kelvin.contracts.accounting.usage import LifetimeRecord, RequestRecord
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.numbers import parse_whole_number
from kelvin.contracts.wire import Wire, decode, encode
from kelvin.process.atomic_file import write_atomic
from kelvin.spool.frame import Frame
from kelvin.spool.inspection import frames_after
from kelvin.spool.segment_disk import SegmentDisk
from kelvin.spool.segment_reader import SegmentReader, encode_position, last_sequence, read_position, try_read_position
from kelvin.spool.segment_writer import SEGMENT_BYTES, SegmentWriter
from kelvin.spool.source_directory import SourceDirectory

log = logging.getLogger(__name__)

JOURNAL_DIRECTORY: Final = "journal"
NUMBER_FILE: Final = "number"  # the file with the journal's number
COMMITTED_FILE: Final = "committed"  # the file with the highest position that the database was seen to have
_MAX_NUMBER: Final = 2**31 - 1
LIMIT_BYTES: Final = 64 << 30
CLOSING_BYTES: Final = 256 << 20  # limit of an uncompressed frozen bill: about a million lines
PIECE_BYTES: Final = 128 * 1024
REQUEST, LIFETIME, _CLOSING, _PIECE, _DROPPED, _UNREADABLE, _GAP = b"R", b"L", b"C", b"P", b"D", b"U", b"G"
_PIECE_HEADER: Final = struct.Struct("<cII")  # kind, index of the piece, number of pieces


class OlderDatabase(Exception):
    """The database is a copy that was put back by hand. It lacks entries that were committed."""

    def __init__(self, position: int, known: int) -> None:
        super().__init__(f"the database ends at entry {position} of the journal, and had entry {known} before")


class ClosedMonthEntry(Wire, frozen=True):
    """A month that was closed: the frozen prices, as JSON, and the frozen bill."""

    prices: str
    report: BillingReport


class DroppedMark(Wire, frozen=True):
    """A mark: entries after `after`, up to and including `until`, were never committed."""

    after: int
    until: int


JournalEntry = RequestRecord | LifetimeRecord | ClosedMonthEntry | Unreadable


def decode_entry(payload: bytes, now_us: int = 0) -> JournalEntry:
    """Return the entry. An unreadable record is returned as `Unreadable`, because the ledger keeps it aside. If its
    time can't be read it counts as of `now_us`.

    Raises Refused(InvalidRequest) or ValueError for anything else that can't be read.
    """
    kind, body = payload[:1], payload[1:]
    match kind:
        case b"R":
            return _first(split([body], RequestRecord, now_us))
        case b"L":
            return _first(split([body], LifetimeRecord, now_us))
        case b"U":
            return decode(body, Unreadable, field="entry of the journal")
        case b"C":
            return decode(_decompress(body), ClosedMonthEntry, field="entry of the journal")
    raise ValueError(f"an entry of kind {kind!r}")


def _first(found: tuple[Sequence[R], Sequence[Unreadable]]) -> R | Unreadable:
    records, unreadable = found
    return records[0] if records else unreadable[0]


def _decompress(body: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(body, CLOSING_BYTES)
    except zlib.error as error:
        raise ValueError(f"a closing that does not unpack: {error}") from error
    if not unpacking.eof:
        raise ValueError(f"a closing that is cut, or larger than {CLOSING_BYTES} bytes")
    return content


def encode_entry(entry: JournalEntry) -> bytes:
    """Return the payload of an entry. A closing is compressed."""
    match entry:
        case RequestRecord():
            return REQUEST + encode(entry)
        case LifetimeRecord():
            return LIFETIME + encode(entry)
        case Unreadable():
            return _UNREADABLE + encode(entry)
        case ClosedMonthEntry():
            return _CLOSING + zlib.compress(msgspec.json.encode(entry, order="deterministic"))


def _decode_mark(payload: bytes) -> DroppedMark:
    return decode(payload[1:], DroppedMark, field="mark of the journal")


def split_payload(payload: bytes) -> list[bytes]:
    """Return the payload of an entry, in pieces if it does not fit one frame."""
    if len(payload) <= PIECE_BYTES:
        return [payload]
    pieces = [payload[at : at + PIECE_BYTES] for at in range(0, len(payload), PIECE_BYTES)]
    return [_PIECE_HEADER.pack(_PIECE, number, len(pieces)) + piece for number, piece in enumerate(pieces)]


def _ensure_number(directory: Path) -> int:
    """Return the journal's random number. If it can't be read, a new one is drawn, and no entry counts as dropped.

    Raises OSError.
    """
    path = directory / NUMBER_FILE
    with suppress(FileNotFoundError):
        known = parse_whole_number(path.read_bytes())
        if known is not None and 0 < known <= _MAX_NUMBER:
            return known
    drawn = 1 + secrets.randbelow(_MAX_NUMBER)
    with suppress(OSError):  # on a full disk the next start draws again
        write_atomic(path, str(drawn).encode(), 0o600)
    return drawn


class LedgerJournal:
    """The only writer of `place`/journal. Used on the database's writer thread. Close it where you opened it."""

    def __init__(
        self, place: Path, *, used: int = 0, disk: SegmentDisk | None = None, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """Open the journal. Backups contain entries up to `used`. Raises OSError; BlockingIOError if it is in use."""
        self._home = SourceDirectory.lock(place, JOURNAL_DIRECTORY)
        try:
            self._journal = SegmentWriter(
                self._home.path, disk=disk, segment_bytes=segment_bytes, limit_bytes=LIMIT_BYTES
            )
            self._tail = SegmentReader(self._home.path)
            self.number = _ensure_number(self._home.path)
            self._last_readable = last_sequence(self._home.path)
            # A journal of an older program, or with a damaged note, doesn't say what was committed. Then all count.
            known = try_read_position(self._home.path / COMMITTED_FILE)
            self._dropped_until = self.committed if known is None else 0  # entries up to here never need a mark
            self._last_committed = -1 if known is None else known
            self._last_used = max(used, self._last_committed)
            if self.committed == 0:
                self._note_committed(0)  # in a new journal only committed entries count
        except BaseException:
            self._home.close()
            raise

    def __repr__(self) -> str:
        return f"<LedgerJournal committed={self.committed} from={self._tail.acknowledged}>"

    @property
    def committed(self) -> int:
        """The sequence of the last durable entry."""
        return self._journal.committed

    def append(self, entries: Sequence[JournalEntry]) -> None:
        """Append entries durably. Appending them again is harmless. Raises Refused(Unavailable)."""
        self._append([payload for entry in entries for payload in split_payload(encode_entry(entry))])

    def skip_to(self, position: int | None) -> None:
        """If the journal's files end before the database's `position`, or before entries that backups contain, continue
        after those.

        Backups say by sequence which entries follow them, so no sequence may be given twice. After a restore the
        database has no position (None). Then readable entries behind a damaged one count as used, because the restore
        entered them. Raises as `append`.
        """
        used = max(self._last_readable if position is None else position, self._last_used)
        if used > self.committed:
            log.error("the journal has lost entries", extra={"after": self.committed, "until": used})
            self._journal.advance_to(used)
            self._append([_DROPPED + encode(DroppedMark(after=used, until=used))])  # drops nothing; it uses up `used`

    def check(self, position: int) -> None:
        """Raise OlderDatabase if the database ends at `position` and was known to be further."""
        if position < self._last_committed:
            raise OlderDatabase(position, self._last_committed)

    def drop_after(self, position: int) -> None:
        """Mark entries after `position` as dropped, because the database's last transaction ended there.

        Raises as `append`, and OlderDatabase if the database was known to be further: it lacks acknowledged entries.
        """
        self.check(position)
        # Else, if this transaction failed, the next start would drop entries that count.
        if position >= self._dropped_until:
            self._note_committed(position)
        if self.committed <= max(position, self._dropped_until):
            return
        log.warning("entries of the journal were not committed", extra={"after": position, "until": self.committed})
        self._append([_DROPPED + encode(DroppedMark(after=position, until=self.committed))])
        self._dropped_until = self.committed

    def _note_committed(self, position: int) -> None:
        # Not synced, and errors are ignored: an outdated note only detects fewer databases that were put back.
        if position > self._last_committed:
            self._last_committed = position
            with suppress(OSError):
                fd = os.open(self._home.path / COMMITTED_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.pwrite(fd, encode_position(position), 0)  # in place: it needs no room on a full disk
                finally:
                    os.close(fd)

    def mark_gap(self) -> None:
        """Mark that entries were made without this journal. Raises as `append`."""
        if self.committed:  # else there is no backup before the mark
            log.warning("the journal lacks what was entered while it was not in use")
            self._append([_GAP])

    def _append(self, payloads: Sequence[bytes]) -> None:
        for outcome in self._journal.commit([lambda _, payload=payload: payload for payload in payloads]):  # type: ignore[misc]
            if isinstance(outcome, Exception):
                log.error("the journal of the ledger can't be written", extra={"error": repr(outcome)})
                raise Refused(Unavailable("the place of backups")) from outcome

    def trim(self, after: int) -> None:
        """Delete entries up to `after`, in whole segments. Raises OSError."""
        self._tail.acknowledge(min(after, self.committed))

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._journal.close()
        self._tail.close()
        self._home.close()


@dataclass(frozen=True, slots=True)
class JournalExtent:
    """The entries that a journal holds: those after `trimmed`, up to `last`."""

    trimmed: int
    last: int


def journal_extent(place: Path) -> JournalExtent:
    """Return which entries a journal holds that has no writer. An absent journal is empty."""
    directory = place / JOURNAL_DIRECTORY
    if not directory.is_dir():
        return JournalExtent(0, 0)
    return JournalExtent(read_position(directory), last_sequence(directory))


def entries_after(place: Path, after: int) -> Iterator[tuple[int, JournalEntry]]:
    """Yield sequence and entry of all committed, readable entries. Raises as `decode_entry`, and OSError.

    Missing sequences were lost or never committed.
    """
    return ((sequence, decode_entry(payload)) for sequence, payload in payloads_after(place, after))


def payloads_after(place: Path, after: int) -> Iterator[tuple[int, bytes]]:
    """Yield the same entries as `entries_after`, undecoded. They include those that only a newer program can decode."""
    directory = place / JOURNAL_DIRECTORY
    dropped = deque[DroppedMark]()
    for _, payload in join_pieces(frames_after(directory, after)):
        if payload[:1] == _DROPPED:
            mark = _decode_mark(payload)
            if dropped and dropped[-1].until > mark.after:  # the next transaction failed, too: join the marks
                mark = DroppedMark(after=min(dropped.pop().after, mark.after), until=mark.until)
            dropped.append(mark)
    for sequence, payload in join_pieces(frames_after(directory, after)):
        while dropped and dropped[0].until < sequence:
            dropped.popleft()
        is_dropped = bool(dropped) and dropped[0].after < sequence
        if payload[:1] not in (_DROPPED, _GAP) and not is_dropped:
            yield sequence, payload


def count_lost_after(place: Path, after: int) -> int | None:
    """Return how many frames after `after` can't be read; None if the journal ends before it. Raises OSError.

    A gap counts as one, because it is unknown how many entries were made without the journal. A closing that was
    written only in part is no loss: it was never committed, and will be closed again.
    """
    last = journal_extent(place).last
    if last < after:
        return None
    return last - after - sum(frame.payload != _GAP for frame in frames_after(place / JOURNAL_DIRECTORY, after))


def join_pieces(frames: Iterable[Frame]) -> Iterator[tuple[int, bytes]]:
    """Yield the last sequence and the payload of each entry. Incomplete pieces are left out."""
    pieces: list[bytes] = []
    last = 0
    for frame in frames:
        if frame.payload[:1] != _PIECE:
            yield frame.sequence, frame.payload
            continue
        _, number, count = _PIECE_HEADER.unpack_from(frame.payload)
        if number == 0 or number != len(pieces) or frame.sequence != last + 1:
            pieces = []
        if number == len(pieces):
            pieces.append(frame.payload[_PIECE_HEADER.size :])
        last = frame.sequence
        if len(pieces) == count:
            yield frame.sequence, b"".join(pieces)
            pieces = []
