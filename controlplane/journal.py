"""The ledger's journal: what is entered is also written here, in the same order, before its sender may forget it.

It lies with the backups, on another disk if its owner chose one. A backup and the journal behind it make the ledger
again, to the last record that was acknowledged. Frames and segments are the spool's.
"""

import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from contracts.billing import BillingReport
from contracts.errors import Refused, Unavailable
from contracts.usage import LifetimeRecord, RequestRecord
from contracts.wire import Wire, decode, encode
from spool.disk import Disk
from spool.home import Home
from spool.journal import SEGMENT_BYTES, Journal
from spool.looking import frames_after
from spool.reader import Tail, last_sequence, read_position

log = logging.getLogger(__name__)

DIRECTORY: Final = "journal"
LIMIT_BYTES: Final = 64 << 30
CLOSING_BYTES: Final = 256 << 20  # of a frozen bill, unpacked: some million of its lines
_REQUEST, _LIFETIME, _CLOSING = b"R", b"L", b"C"


class Closing(Wire, frozen=True):
    """A month that was closed: the frozen prices, as JSON, and the frozen bill."""

    prices: str
    report: BillingReport


Entry = RequestRecord | LifetimeRecord | Closing


def entry_of(payload: bytes) -> Entry:
    """Raises Refused(InvalidRequest), ValueError."""
    kind, body = payload[:1], payload[1:]
    match kind:
        case b"R":
            return decode(body, RequestRecord, what="entry of the journal")
        case b"L":
            return decode(body, LifetimeRecord, what="entry of the journal")
        case b"C":
            return decode(_unpacked(body), Closing, what="entry of the journal")
    raise ValueError(f"an entry of kind {kind!r}")


def _unpacked(body: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(body, CLOSING_BYTES)
    except zlib.error as error:
        raise ValueError(f"a closing that does not unpack: {error}") from error
    if not unpacking.eof:
        raise ValueError(f"a closing that is cut, or larger than {CLOSING_BYTES} bytes")
    return content


def payload_of(entry: Entry) -> bytes:
    """As it lies in a frame. A closing is packed: a bill of many models would not fit one."""
    match entry:
        case RequestRecord():
            return _REQUEST + encode(entry)
        case LifetimeRecord():
            return _LIFETIME + encode(entry)
        case Closing():
            return _CLOSING + zlib.compress(msgspec.json.encode(entry, order="deterministic"))


class LedgerJournal:
    """The one writer of `place`/journal. Used on the database's writer thread; close it where you opened it."""

    def __init__(self, place: Path, *, disk: Disk | None = None, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises OSError; BlockingIOError where another installation writes there."""
        self._home = Home.claim(place, DIRECTORY)
        try:
            self._journal = Journal(self._home.path, disk=disk, segment_bytes=segment_bytes, limit_bytes=LIMIT_BYTES)
            self._tail = Tail(self._home.path)
        except BaseException:
            self._home.close()
            raise

    def __repr__(self) -> str:
        return f"<LedgerJournal committed={self.committed} from={self._tail.acknowledged}>"

    @property
    def committed(self) -> int:
        """The last durable entry."""
        return self._journal.committed

    def append(self, entries: Sequence[Entry]) -> None:
        """Durable on return. Raises Refused(Unavailable): then the same may be appended again, twice is harmless."""
        payloads = [payload_of(entry) for entry in entries]
        for outcome in self._journal.commit([lambda _, payload=payload: payload for payload in payloads]):  # type: ignore[misc]
            if isinstance(outcome, Exception):
                log.error("the journal of the ledger can't be written", extra={"error": repr(outcome)})
                raise Refused(Unavailable("the place of backups")) from outcome

    def trim(self, after: int) -> None:
        """Entries up to `after` are not needed any more. Raises OSError."""
        self._tail.acknowledge(min(after, self.committed))

    def close(self) -> None:
        """Idempotent."""
        self._journal.close()
        self._tail.close()
        self._home.close()


@dataclass(frozen=True, slots=True)
class Extent:
    """Which entries a journal holds: those above `trimmed`, up to `last`."""

    trimmed: int
    last: int


def extent_of(place: Path) -> Extent:
    """Of a journal that nobody writes. An absent one is empty."""
    directory = place / DIRECTORY
    if not directory.is_dir():
        return Extent(0, 0)
    return Extent(read_position(directory), last_sequence(directory))


def entries_after(place: Path, after: int) -> Iterator[tuple[int, Entry]]:
    """Sequence and entry of everything that can be read. A jump in the sequences is lost. Raises OSError."""
    for frame in frames_after(place / DIRECTORY, after):
        yield frame.sequence, entry_of(frame.payload)
