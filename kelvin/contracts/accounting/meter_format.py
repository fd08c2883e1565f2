"""The meter page: a file in which a runtime accounts for its time, so that SIGKILL loses nothing.

The runtime maps the file and is its only writer. It updates two slots at each transition, the second slot first. If the
process dies in the middle of one write, the other slot is intact. After the death, the supervisor reads the file and
closes the open interval. Times are CLOCK_MONOTONIC nanoseconds, which all processes share.
"""

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

METER_BYTES: Final = 512
METER_FILE_BYTES: Final = 2 * METER_BYTES
SEQUENCE_AT: Final = 8  # offset of the sequence number in a slot
_LAYOUT: Final = struct.Struct("<4sIQQQQQQQQ64s64s64s64s36s")
DEVICE_CLASS_BYTES: Final = 64  # width of the ledger's column; `names.is_device_class` refuses longer names
_MAGIC: Final = b"KMT1"
_SLACK_NS: Final = 100_000_000  # one kernel tick, plus the noise of reading a process's start time twice


class Phase(IntEnum):
    """The phase of a replica's life, as billed."""

    STANDBY = 0
    RESTORE = 1
    ACTIVE = 2  # at least one request is in the engine
    IDLE = 3


@dataclass(frozen=True, slots=True)
class Meter:
    """Closed intervals per phase, and the open phase, which began at `since_ns`."""

    phase: Phase
    start_time_ns: int
    since_ns: int
    spent_ns: tuple[int, int, int, int] = (0, 0, 0, 0)  # indexed by Phase
    requests: int = 0
    tenant: str = ""
    model: str = ""
    version: str = ""
    device_class: str = ""
    # The kernel's boot id. Times of different boots can't be compared. "" if written by an older program.
    boot: str = ""

    def enter(self, phase: Phase, now_ns: int) -> "Meter":
        """Return a meter with the open interval closed and `phase` begun."""
        return replace(self.close_interval(now_ns), phase=phase, since_ns=now_ns)

    def is_older_than(self, start_time_ns: int) -> bool:
        """Return whether an earlier process with the same pid wrote the page, before this process started."""
        return self.since_ns < start_time_ns - _SLACK_NS

    def close_interval(self, now_ns: int) -> "Meter":
        """Return a copy in which the open interval is counted up to `now_ns`."""
        spent = list(self.spent_ns)
        spent[self.phase] += max(0, now_ns - self.since_ns)
        return replace(self, spent_ns=(spent[0], spent[1], spent[2], spent[3]), since_ns=now_ns)


def encode_meter(meter: Meter, sequence: int) -> bytes:
    """Return one slot of METER_BYTES. `sequence` is odd while a write is in progress, even once it is complete. Raises
    ValueError for a name that does not fit. A shortened name would be billed to another subject.
    """
    texts = [text.encode() for text in (meter.tenant, meter.model, meter.version, meter.device_class, meter.boot)]
    for text, max_bytes in zip(texts, (64, 64, 64, DEVICE_CLASS_BYTES, 36), strict=True):
        if len(text) > max_bytes:
            raise ValueError(f"{text[:80]!r} of {len(text)} bytes does not fit a meter page")
    return _LAYOUT.pack(
        _MAGIC, meter.phase, sequence, meter.start_time_ns, meter.since_ns, *meter.spent_ns, meter.requests, *texts
    ).ljust(METER_BYTES, b"\0")


def decode_meter(page: bytes) -> Meter:
    """Return the meter of the first slot, or of the second slot if a write of the first was in progress. Raises
    ValueError for bytes that no runtime wrote.
    """
    if len(page) < METER_BYTES:
        raise ValueError(f"meter page has {len(page)} bytes, not {METER_BYTES}")
    torn = int.from_bytes(page[SEQUENCE_AT : SEQUENCE_AT + 8], "little") % 2 == 1
    slot = METER_BYTES if torn and len(page) >= METER_FILE_BYTES else 0
    magic, phase, _, start_time_ns, since, standby, restore, active, idle, requests, *texts = _LAYOUT.unpack_from(
        page, slot
    )
    if magic != _MAGIC:
        raise ValueError("not a meter page")
    try:
        tenant, model, version, device_class, boot = (text.rstrip(b"\0").decode() for text in texts)
    except UnicodeDecodeError:
        raise ValueError("the names in the meter page are not UTF-8") from None
    spent = (standby, restore, active, idle)
    return Meter(Phase(phase), start_time_ns, since, spent, requests, tenant, model, version, device_class, boot)
