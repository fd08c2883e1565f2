"""Faulty disks with the interface of the real one: full, failing, stalled, or losing unsynced data."""

import errno
import os
import random
import threading
from pathlib import Path
from typing import Final

from kelvin.spool.segment_disk import SegmentDisk

DEADLINE_S: Final = 20.0  # how long a test waits for a disk


class FailingDisk(SegmentDisk):
    """A disk that fails the operations in `fail`. A failing write writes its first half."""

    def __init__(self, *fail: str) -> None:
        self.fail = set(fail)

    def create(self, path: Path, size: int) -> int:
        self._maybe_fail("create")
        return super().create(path, size)

    def write(self, fd: int, payload: bytes, offset: int) -> None:
        if "write" in self.fail:
            super().write(fd, payload[: len(payload) // 2], offset)
        self._maybe_fail("write")
        super().write(fd, payload, offset)

    def sync(self, fd: int) -> None:
        self._maybe_fail("sync")
        super().sync(fd)

    def sync_directory(self, directory: Path) -> None:
        self._maybe_fail("sync_directory")
        super().sync_directory(directory)

    def truncate(self, fd: int, size: int) -> None:
        self._maybe_fail("truncate")
        super().truncate(fd, size)

    def _maybe_fail(self, operation: str) -> None:
        if operation in self.fail:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class GatedDisk(SegmentDisk):
    """A disk that syncs only while `gate` is open. `reached` is set when a sync waits."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.syncs = 0

    def sync(self, fd: int) -> None:
        self.reached.set()
        assert self.gate.wait(DEADLINE_S)
        self.syncs += 1
        super().sync(fd)


class LosingDisk(SegmentDisk):
    """A disk that tracks unsynced data. `power_cut` drops a random part of it, in 512-byte sectors. Names created
    without a directory sync may vanish too."""

    def __init__(self, seed: int, *, honest: bool = True) -> None:
        self._random = random.Random(seed)
        self._honest = honest
        self._durable: dict[int, bytearray] = {}
        self._paths: dict[int, Path] = {}
        self._unsynced_names: set[Path] = set()

    def create(self, path: Path, size: int) -> int:
        fd = super().create(path, size)
        self._durable[fd] = bytearray(size)
        self._paths[fd] = path
        self._unsynced_names.add(path)
        return fd

    def sync(self, fd: int) -> None:
        if self._honest:
            super().sync(fd)
            self._durable[fd] = bytearray(os.pread(fd, len(self._durable[fd]), 0))

    def sync_directory(self, directory: Path) -> None:
        if self._honest:
            self._unsynced_names = {path for path in self._unsynced_names if path.parent != directory}

    def power_cut(self) -> None:
        """Leave what a disk may hold after a power cut: everything synced, and any part of the rest."""
        for fd, path in self._paths.items():
            if not path.exists():
                continue
            if path in self._unsynced_names and self._random.random() < 0.5:
                path.unlink()
                continue
            now, then = path.read_bytes(), self._durable[fd]
            mixed = bytearray(then)
            for sector in range(0, len(now), 512):
                if self._random.random() < 0.5:
                    mixed[sector : sector + 512] = now[sector : sector + 512]
            path.write_bytes(mixed)
