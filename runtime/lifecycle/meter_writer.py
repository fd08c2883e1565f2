"""Write how this replica spends its life into its meter page. `meter_format.py` in contracts defines the figures.

The page outlives the process: the supervisor reads it however the process ended. Its path names the process, not the
tenant.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from kelvin.contracts.accounting.meter_format import (
    METER_BYTES,
    METER_FILE_BYTES,
    SEQUENCE_AT,
    Meter,
    Phase,
    encode_meter,
)
from kelvin.process.procfs import boot_id

CHECKPOINT_NS: Final = 5_000_000_000  # about what is lost if the supervisor doesn't see the end of a life

Page = mmap.mmap | bytearray


class MeterWriter:
    """The only writer of one meter page. Thread-safe: the engine thread and the event loop both call it."""

    def __init__(
        self,
        page: Page,
        *,
        born_ns: int | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        boot: str = "",
    ) -> None:
        """The standby phase began at `born_ns` (default: now). `boot` is the kernel's boot id."""
        self._page = page
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._sequence = 0
        born = clock_ns() if born_ns is None else born_ns
        self._meter = Meter(Phase.STANDBY, start_time_ns=born, since_ns=born, boot=boot)
        self._write()

    def __repr__(self) -> str:
        return f"<MeterWriter {self._meter.phase.name.lower()} requests={self._meter.requests}>"

    @property
    def meter(self) -> Meter:
        """Return the meter as the page has it."""
        return self._meter

    def identify(self, *, tenant: str, model: str, version: str, device_class: str) -> None:
        """Assign the replica to this tenant's version and begin the restore phase."""
        with self._lock:
            named = replace(self._meter, tenant=tenant, model=model, version=version, device_class=device_class)
            self._meter = named.enter(Phase.RESTORE, self._clock_ns())
            self._write()

    def start_phase(self, phase: Phase) -> None:
        """Close the open interval and begin a new one."""
        with self._lock:
            self._meter = self._meter.enter(phase, self._clock_ns())
            self._write()

    def checkpoint(self) -> None:
        """Count the open interval up to now if it is CHECKPOINT_NS long. Call it often.

        A replica that stays idle or busy for hours changes no phase. If its supervisor dies with it, the page has its
        life up to the last checkpoint.
        """
        with self._lock:
            now_ns = self._clock_ns()
            if now_ns - self._meter.since_ns >= CHECKPOINT_NS:
                self._meter = self._meter.close_interval(now_ns)
                self._write()

    def count_request(self) -> None:
        """Count one more request for which a usage record must exist."""
        with self._lock:
            self._meter = replace(self._meter, requests=self._meter.requests + 1)
            self._write()

    def _write(self) -> None:
        self._sequence += 2
        _write_slot(self._page, METER_BYTES, self._meter, self._sequence)
        _write_slot(self._page, 0, self._meter, self._sequence)


def _write_slot(page: Page, offset: int, meter: Meter, sequence: int) -> None:
    """Write an odd sequence number, the body, then an even one, so that a torn write is detected (seqlock)."""
    body = encode_meter(meter, sequence)
    first, last = SEQUENCE_AT, SEQUENCE_AT + 8
    page[offset + first : offset + last] = (sequence - 1).to_bytes(8, "little")
    page[offset : offset + first] = body[:first]
    page[offset + last : offset + METER_BYTES] = body[last:]
    page[offset + first : offset + last] = body[first:last]


def create_meter_page(directory: Path, runtime_id: str, *, born_ns: int | None = None) -> MeterWriter:
    """Create `directory/<pid>.<runtime_id>` and map it. The supervisor removes it after reading it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{os.getpid()}.{runtime_id}"
    # Fill the file outside the directory and rename it, so that every file in the directory decodes.
    fresh = directory.parent / f".meter-{path.name}"
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, METER_FILE_BYTES)  # a full disk is an error here, not a SIGBUS at the first write
        page = MeterWriter(mmap.mmap(fd, METER_FILE_BYTES), born_ns=born_ns, boot=boot_id())
        fresh.rename(path)
    except BaseException:
        fresh.unlink()
        raise
    finally:
        os.close(fd)
    return page
