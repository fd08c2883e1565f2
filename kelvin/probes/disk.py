"""Measure the data directory's disk with a file of its own, gone afterwards. Bounded in bytes and in seconds."""

import mmap
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

from kelvin.policy.machine import READ_ROOM_BYTES, DiskFacts

READ_BYTES: Final = 128 << 20
SECONDS: Final = 3.0  # for each of writing, reading and syncing
SYNCS: Final = 50
_PIECE: Final = 8 << 20
_BLOCK: Final = 4096


def look_at_disk(data: Path, *, read_bytes: int = READ_BYTES, seconds: float = SECONDS) -> DiskFacts:
    """Of the nearest directory above `data` that exists. What the disk refuses is in `fault`.

    With less than READ_ROOM_BYTES free, reading is not measured.
    """
    directory = next(path for path in (data, *data.parents) if path.is_dir())
    usage, nodes = shutil.disk_usage(directory), os.statvfs(directory)
    rate: float | None = None
    syncs, done, fault = [0.0], 0, None
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as scratch:
            path = Path(scratch) / "probe"
            syncs = _sync_times(path, seconds)
            if usage.free >= READ_ROOM_BYTES:
                wanted = min(read_bytes, usage.free // 8 // _PIECE * _PIECE)
                written = _write(path, wanted, seconds)
                rate, done = _read_rate(path, written, seconds)
    except OSError as error:
        fault = f"{directory} can't be written: {error.strerror}"
    return DiskFacts(
        read_bytes_s=rate,
        read_bytes=done,
        sync_p50_s=statistics.median(syncs),
        sync_max_s=max(syncs),
        syncs=len(syncs),
        free_bytes=usage.free,
        total_bytes=usage.total,
        free_inodes=nodes.f_favail if nodes.f_files else None,
        fault=fault,
    )


def _sync_times(path: Path, seconds: float) -> list[float]:
    """Seconds of each fdatasync after one block was written over, as a spool does it."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, SYNCS * _BLOCK)
        block, taken = bytes(range(256)) * (_BLOCK // 256), list[float]()
        limit = time.monotonic() + seconds
        for number in range(SYNCS):
            os.pwrite(fd, block, number * _BLOCK)
            began = time.perf_counter()
            os.fdatasync(fd)
            taken.append(time.perf_counter() - began)
            if time.monotonic() > limit:
                break
        return taken
    finally:
        os.close(fd)


def _write(path: Path, size: int, seconds: float) -> int:
    """Bytes that are on the disk afterwards."""
    piece, written = os.urandom(_PIECE), 0
    limit = time.monotonic() + seconds
    with path.open("wb", buffering=0) as file:
        while written < size and time.monotonic() < limit:
            written += file.write(piece)
            os.fdatasync(file.fileno())
    return written


def _read_rate(path: Path, size: int, seconds: float) -> tuple[float | None, int]:
    """Bytes a second past the page cache, and how many were read; None where O_DIRECT is refused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None, 0
    try:
        with mmap.mmap(-1, _PIECE) as buffer:  # on a page's boundary, as O_DIRECT wants it
            began, done = time.perf_counter(), 0
            while done < size and time.perf_counter() - began < seconds:
                if not (count := os.preadv(fd, [buffer], done)):
                    break
                done += count
            return done / (time.perf_counter() - began), done
    except OSError:  # some file systems take the flag and refuse the read
        return None, 0
    finally:
        os.close(fd)
