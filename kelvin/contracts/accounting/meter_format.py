"""The meter page: how a runtime tells the supervisor how its life was spent, such that SIGKILL loses nothing.

A file of two slots, mapped by its only writer, the runtime, and updated at each transition: the second slot first, so
that a death in the middle of either write leaves the other whole. The supervisor reads the file after the death and
closes the open interval. Times are CLOCK_MONOTONIC nanoseconds, shared by all processes.
"""

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

METER_BYTES: Final = 512
METER_FILE_BYTES: Final = 2 * METER_BYTES
SEQUENCE_AT: Final = 8  # where in a slot its sequence number lies
_LAYOUT: Final = struct.Struct("<4sIQQQQQQQQ64s64s64s64s36s")
DEVICE_CLASS_BYTES: Final = 64  # as wide as the ledger's column; `names.is_device_class` refuses longer ones
_MAGIC: Final = b"KMT1"
_SLACK_NS: Final = 100_000_000  # the kernel's tick, and the noise of two readings of a process's start


class Phase(IntEnum):
    """What a replica is doing, as far as the bill is concerned."""

    STANDBY = 0
    RESTORE = 1
    ACTIVE = 2  # at least one request is in the engine
    IDLE = 3


@dataclass(frozen=True, slots=True)
class Meter:
    """Closed intervals per phase, and the phase that is open since `since_ns`."""

    phase: Phase
    born_ns: int
    since_ns: int
    spent_ns: tuple[int, int, int, int] = (0, 0, 0, 0)  # by Phase
    requests: int = 0
    tenant: str = ""
    model: str = ""
    version: str = ""
    device_class: str = ""
    boot: str = ""  # the kernel's boot id: times of another boot can't be compared; "" of an older program

    def enter(self, phase: Phase, now_ns: int) -> "Meter":
        """Close the open interval and begin `phase`."""
        return replace(self.closed(now_ns), phase=phase, since_ns=now_ns)

    def is_older_than(self, born_ns: int) -> bool:
        """Whether the page was written before the process that was born then: by an earlier one with the same pid."""
        return self.since_ns < born_ns - _SLACK_NS

    def closed(self, now_ns: int) -> "Meter":
        """The same with the open interval counted up to `now_ns`."""
        spent = list(self.spent_ns)
        spent[self.phase] += max(0, now_ns - self.since_ns)
        return replace(self, spent_ns=(spent[0], spent[1], spent[2], spent[3]), since_ns=now_ns)


def encode_meter(meter: Meter, sequence: int) -> bytes:
    """One slot, METER_BYTES long. `sequence` is even for a finished write, odd while it lasts.

    Raises ValueError for a name that does not fit: cut, it would be billed as another one.
    """
    texts = [text.encode() for text in (meter.tenant, meter.model, meter.version, meter.device_class, meter.boot)]
    for text, most in zip(texts, (64, 64, 64, DEVICE_CLASS_BYTES, 36), strict=True):
        if len(text) > most:
            raise ValueError(f"{text[:80]!r} of {len(text)} bytes does not fit a meter page")
    return _LAYOUT.pack(
        _MAGIC, meter.phase, sequence, meter.born_ns, meter.since_ns, *meter.spent_ns, meter.requests, *texts
    ).ljust(METER_BYTES, b"\0")


def decode_meter(page: bytes) -> Meter:
    """The first slot, or the second where the first was being written. Raises ValueError on what no runtime wrote."""
    if len(page) < METER_BYTES:
        raise ValueError(f"meter page has {len(page)} bytes, not {METER_BYTES}")
    torn = int.from_bytes(page[SEQUENCE_AT : SEQUENCE_AT + 8], "little") % 2 == 1
    slot = METER_BYTES if torn and len(page) >= METER_FILE_BYTES else 0
    magic, phase, _, born, since, standby, restore, active, idle, requests, *texts = _LAYOUT.unpack_from(page, slot)
    if magic != _MAGIC:
        raise ValueError("not a meter page")
    try:
        tenant, model, version, device_class, boot = (text.rstrip(b"\0").decode() for text in texts)
    except UnicodeDecodeError:
        raise ValueError("a meter page whose names are no text") from None
    spent = (standby, restore, active, idle)
    return Meter(Phase(phase), born, since, spent, requests, tenant, model, version, device_class, boot)
