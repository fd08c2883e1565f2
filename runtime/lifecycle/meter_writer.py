"""Write how this replica's life is spent into its meter page. What the figures mean is contracts/meter's.

The page outlives the process: the supervisor reads it after any death. Where it lies names the process, not the tenant.
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

CHECKPOINT_NS: Final = 5_000_000_000  # what is lost of a life whose end nobody saw, about

Page = mmap.mmap | bytearray


class MeterWriter:
    """One writer's view of its page. Callable from the engine thread and the event loop alike: a lock orders them."""

    def __init__(
        self,
        page: Page,
        *,
        born_ns: int | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        boot: str = "",
    ) -> None:
        """The standby phase began at `born_ns`; without it, now. `boot` is the kernel's boot id."""
        self._page = page
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._sequence = 0
        born = clock_ns() if born_ns is None else born_ns
        self._meter = Meter(Phase.STANDBY, born_ns=born, since_ns=born, boot=boot)
        self._write()

    def __repr__(self) -> str:
        return f"<MeterWriter {self._meter.phase.name.lower()} requests={self._meter.requests}>"

    @property
    def meter(self) -> Meter:
        """What the page says."""
        return self._meter

    def identify(self, *, tenant: str, model: str, version: str, device_class: str) -> None:
        """From now on the replica is this tenant's and restoring."""
        with self._lock:
            named = replace(self._meter, tenant=tenant, model=model, version=version, device_class=device_class)
            self._meter = named.enter(Phase.RESTORE, self._clock_ns())
            self._write()

    def start_phase(self, phase: Phase) -> None:
        """Close the open interval and begin another."""
        with self._lock:
            self._meter = self._meter.enter(phase, self._clock_ns())
            self._write()

    def checkpoint(self) -> None:
        """Count the open interval up to now if it is CHECKPOINT_NS long. Call it often.

        A replica that is idle or busy for hours makes no transition. If whoever reaps it is killed with it, its life
        counts up to what the page says.
        """
        with self._lock:
            now_ns = self._clock_ns()
            if now_ns - self._meter.since_ns >= CHECKPOINT_NS:
                self._meter = self._meter.closed(now_ns)
                self._write()

    def count_request(self) -> None:
        """One more request for which a record must exist."""
        with self._lock:
            self._meter = replace(self._meter, requests=self._meter.requests + 1)
            self._write()

    def _write(self) -> None:
        self._sequence += 2
        _write_slot(self._page, METER_BYTES, self._meter, self._sequence)
        _write_slot(self._page, 0, self._meter, self._sequence)


def _write_slot(page: Page, at: int, meter: Meter, sequence: int) -> None:
    """Odd, body, even: whoever reads, or dies, in between can tell."""
    body = encode_meter(meter, sequence)
    first, last = SEQUENCE_AT, SEQUENCE_AT + 8
    page[at + first : at + last] = (sequence - 1).to_bytes(8, "little")
    page[at : at + first] = body[:first]
    page[at + last : at + METER_BYTES] = body[last:]
    page[at + first : at + last] = body[first:last]


def create_meter_page(directory: Path, runtime_id: str, *, born_ns: int | None = None) -> MeterWriter:
    """Make `directory/<pid>.<runtime_id>` and map it. The supervisor removes it once it was read."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{os.getpid()}.{runtime_id}"
    # Filled elsewhere: whatever is found in the directory decodes.
    fresh = directory.parent / f".meter-{path.name}"
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, METER_FILE_BYTES)  # on a full disk an error here, not a SIGBUS at the first write
        page = MeterWriter(mmap.mmap(fd, METER_FILE_BYTES), born_ns=born_ns, boot=boot_id())
        fresh.rename(path)
    except BaseException:
        fresh.unlink()
        raise
    finally:
        os.close(fd)
    return page
