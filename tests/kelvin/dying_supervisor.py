"""Record a replica's exit and die at POINT: `python -m tests.kelvin.dying_supervisor DATA POINT`."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from kelvin.spool.segment_disk import SegmentDisk
from kelvin.spool.spool import Spool
from kelvin.supervisor.child_group import ReapedChild
from kelvin.supervisor.exit_recorder import ExitRecorder

SOURCE: Final = "supervisor-1"
POINTS: Final = ("before the record", "half a record", "written", "synced", "page removed")
PID: Final = 4_000_000  # larger than any process id that the kernel assigns


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingDisk(SegmentDisk):
    """The real disk, except that the process dies at `point`."""

    def __init__(self, point: str) -> None:
        self._point = point

    def write(self, fd: int, payload: bytes, offset: int) -> None:
        if self._point == "before the record":
            _die()
        if self._point == "half a record":
            super().write(fd, payload[: len(payload) // 2], offset)
            _die()
        super().write(fd, payload, offset)

    def sync(self, fd: int) -> None:
        if self._point == "written":
            _die()
        super().sync(fd)


def main(data: Path, point: str) -> None:
    """Record the exit of the replica with process id PID."""
    spool = Spool.open(data / "spool", SOURCE, disk=DyingDisk(point))
    recorder = ExitRecorder(data / "run" / "meters", spool, SOURCE)
    unlink = Path.unlink

    def dying_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "meters":
            if point == "synced":
                _die()
            unlink(path, missing_ok)
            _die()
        unlink(path, missing_ok)

    Path.unlink = dying_unlink  # type: ignore[assignment, method-assign]

    async def record_exit() -> None:
        recorder.record_exit(ReapedChild(PID, -9, 9_000_000, time.monotonic_ns(), 5_000, 6_000))
        await recorder.wait_recorded(60.0)

    asyncio.run(record_exit())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
