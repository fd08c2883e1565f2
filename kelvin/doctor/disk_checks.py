"""Measure the disk of the data directory with a temporary file, within a limit of bytes and seconds."""

import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kelvin.doctor.finding_policy import GB, Finding, FindingLevel, format_bytes

READ_BYTES: Final = 128 << 20
READ_ROOM_BYTES: Final = 64 << 20  # with less free space, the file for the read test would take space from requests
MEASURE_S: Final = 3.0  # each for writing, reading and syncing
MAX_SYNCS: Final = 50
MODEL_BYTES: Final = 8_000_000_000  # the example model in cost texts
_FAST_BYTES_S: Final = 1.0 * GB
_SLOW_BYTES_S: Final = 0.2 * GB
_PIECE: Final = 8 << 20
_BLOCK: Final = 4096


def check_disk(data: Path, *, read_bytes: int = READ_BYTES, seconds: float = MEASURE_S) -> list[Finding]:
    """Measure the disk of `data`, or of its nearest existing parent. Reading needs READ_ROOM_BYTES of free space."""
    directory = next(path for path in (data, *data.parents) if path.is_dir())
    usage, nodes = shutil.disk_usage(directory), os.statvfs(directory)
    space = judge_space(usage.free, usage.total, nodes.f_favail if nodes.f_files else None)
    findings = []
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as scratch:
            path = Path(scratch) / "probe"
            sync = judge_sync(_sync_times(path, seconds))
            if usage.free >= READ_ROOM_BYTES:
                written = _write(path, min(read_bytes, usage.free // 8 // _PIECE * _PIECE), seconds)
                findings.append(judge_reading(*_read_rate(path, written, seconds)))
    except OSError as error:
        seen = f"{directory} can't be written: {error.strerror}"
        cost = "pushes are refused (507), and requests (503) once the spool's room is used"
        mend = "make room, or mount it writable; then run doctor again"
        return [Finding("disk", FindingLevel.FAIL, seen, cost, mend), space]
    return [*findings, sync, space]


def judge_reading(bytes_s: float | None, read_bytes: int) -> Finding:
    """Judge the read rate. `bytes_s` is None if the file system refuses O_DIRECT."""
    check = "disk read"
    if bytes_s is None:
        cost = "cold starts read through the page cache: one more copy of every byte"
        return Finding(
            check, FindingLevel.WARN, "O_DIRECT is refused", cost, "put the data directory on ext4 or XFS on NVMe"
        )
    seen = f"{bytes_s / GB:.2f} GB/s, O_DIRECT, {format_bytes(read_bytes)} read"
    took = f"{MODEL_BYTES / bytes_s:.0f} s or more"
    cost = f"a cold start of a model of {format_bytes(MODEL_BYTES)} from this disk takes {took}"
    if bytes_s >= _FAST_BYTES_S:
        return Finding(check, FindingLevel.OK, seen, cost)
    level = FindingLevel.NOTE if bytes_s >= _SLOW_BYTES_S else FindingLevel.WARN
    return Finding(
        check, level, seen, cost, "a faster disk: --data on local NVMe; or a host tier that holds the models"
    )


def judge_sync(times_s: Sequence[float]) -> Finding:
    """Judge the durations of single fdatasync calls, in seconds."""
    p50_ms, max_ms = statistics.median(times_s) * 1e3, max(times_s) * 1e3
    seen = f"{p50_ms:.2f} ms median, {max_ms:.1f} ms at most, of {len(times_s)} fdatasync"
    cost = f"the last byte of each answer waits for one: {p50_ms:.2f} ms"
    if p50_ms < 2:
        return Finding("disk sync", FindingLevel.OK, seen, cost)
    level = FindingLevel.NOTE if p50_ms < 10 else FindingLevel.WARN
    return Finding("disk sync", level, seen, cost, "a disk with a write cache that survives power loss")


def judge_space(free_bytes: int, total_bytes: int, free_inodes: int | None) -> Finding:
    """Judge free bytes and inodes. `free_inodes` is None if the file system does not count inodes."""
    seen = f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} free"
    mend = (
        "`kelvin up` with a smaller KELVIN_NVME_BYTES frees the cache's room at once; `kelvin versions delete` and, "
        "after the grace period, `kelvin collect --run`; or a larger disk"
    )
    if free_inodes is not None and free_inodes < 1000:
        cost = "no file can be made soon: requests 503, pushes 507"
        return Finding("disk space", FindingLevel.FAIL, f"{seen}, {free_inodes} inodes", cost, mend)
    if free_bytes < GB:
        return Finding(
            "disk space", FindingLevel.FAIL, seen, "pushes are refused (507) soon, then requests (503)", mend
        )
    if free_bytes < 10 * GB or free_bytes * 20 < total_bytes:
        return Finding("disk space", FindingLevel.WARN, seen, "few versions fit; the NVMe tier evicts early", mend)
    return Finding("disk space", FindingLevel.OK, seen)


def _sync_times(path: Path, seconds: float) -> list[float]:
    """Return the seconds of each fdatasync, each after overwriting one block, as a spool does."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, MAX_SYNCS * _BLOCK)
        block, times_s = bytes(range(256)) * (_BLOCK // 256), list[float]()
        limit = time.monotonic() + seconds
        for number in range(MAX_SYNCS):
            os.pwrite(fd, block, number * _BLOCK)
            began = time.perf_counter()
            os.fdatasync(fd)
            times_s.append(time.perf_counter() - began)
            if time.monotonic() > limit:
                break
        return times_s
    finally:
        os.close(fd)


def _write(path: Path, size: int, seconds: float) -> int:
    """Write random bytes and sync them. Return how many bytes are on the disk."""
    piece, written = os.urandom(_PIECE), 0
    limit = time.monotonic() + seconds
    with path.open("wb", buffering=0) as file:
        while written < size and time.monotonic() < limit:
            written += file.write(piece)
            os.fdatasync(file.fileno())
    return written


def _read_rate(path: Path, size: int, seconds: float) -> tuple[float | None, int]:
    """Read with O_DIRECT, past the page cache. Return (bytes/s or None if O_DIRECT is refused, bytes read)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None, 0
    try:
        with mmap.mmap(-1, _PIECE) as buffer:  # page-aligned, as O_DIRECT requires
            began, done = time.perf_counter(), 0
            while done < size and time.perf_counter() - began < seconds:
                if not (count := os.preadv(fd, [buffer], done)):
                    break
                done += count
            return done / (time.perf_counter() - began), done
    except OSError:  # some file systems accept the flag and then refuse the read
        return None, 0
    finally:
        os.close(fd)
