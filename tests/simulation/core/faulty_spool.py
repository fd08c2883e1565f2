"""Spools of a simulation: the committer runs on the loop, and the disk can be full or slow."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

from kelvin.spool.segment_disk import SegmentDisk
from kelvin.spool.spool import Spool

COMMIT_S: Final = 0.001
SEGMENT_BYTES: Final = 8 << 10


class Killed(BaseException):
    """The process is dead at this point: none of its handlers run, and nothing more reaches its disk."""


@dataclass(eq=False)
class FaultyDisk(SegmentDisk):
    """A disk with faults. A commit takes `commit_s`. `is_full` refuses writes, and with `fails` written data may be
    lost. `dies_at` kills the process before or after the next write to the journal.
    """

    commit_s: float = COMMIT_S
    is_full: bool = False
    fails: bool = False
    is_dead: bool = False
    dies_at: str | None = None

    def create(self, path: Path, size: int) -> int:
        self._check()
        return super().create(path, size)

    def write(self, fd: int, payload: bytes, offset: int) -> None:
        self._check()
        if self.dies_at == "before the journal":
            self._die()
        super().write(fd, payload, offset)

    def sync(self, fd: int) -> None:
        self._check()
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.dies_at == "behind the journal":
            self._die()

    def _check(self) -> None:
        if self.is_dead:
            raise Killed("dead already")
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _die(self) -> None:
        dies_at, self.dies_at, self.is_dead = self.dies_at, None, True
        raise Killed(dies_at)


class _CommitQueue:
    """The committer's queue. Each item runs one step of the committer, some time later."""

    def __init__(self) -> None:
        self.step: Callable[[], bool] | None = None
        self.delay_s: Callable[[], float] = lambda: COMMIT_S
        self._waiting = 0

    def put(self, item: None) -> None:
        self._waiting += 1
        asyncio.get_running_loop().call_later(self.delay_s(), self._wake)

    def get(self) -> None:
        self._waiting -= 1

    def _wake(self) -> None:
        if self._waiting and self.step is not None:
            self.step()


class _Committer:
    """A committer without a thread."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._spool: Spool = target.__self__  # type: ignore[attr-defined]

    def start(self) -> None:
        wakes: Any = self._spool._wakes
        wakes.step = self._spool._commit_next

    def join(self, timeout: float | None = None) -> None:
        while self._spool._commit_next():
            pass

    def is_alive(self) -> bool:
        return False


@contextmanager
def without_threads() -> Iterator[None]:
    """Open spools without a thread inside the block."""
    fake = mock.Mock(wraps=threading)
    fake.Thread = _Committer
    with mock.patch("kelvin.spool.spool.threading", fake), mock.patch("kelvin.spool.spool.SimpleQueue", _CommitQueue):
        yield


def close_files(directory: Path) -> None:
    """Close all of this process's open files below the directory, as a kill does."""
    below = f"{directory}{os.sep}"
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if path == str(directory) or path.startswith(below):
            os.close(int(name))


def freeze_spool(spool: Spool) -> None:
    """Stop all commits: the writing process is dead. Close its files once nothing uses them."""
    wakes: Any = spool._wakes
    wakes.step = None
    spool._closing = True


def open_spool(directory: Path, source: str, disk: FaultyDisk) -> Spool:
    """Open a spool on that disk."""
    with without_threads():
        made = Spool.open(directory, source, disk=disk, segment_bytes=SEGMENT_BYTES, limit_bytes=64 * SEGMENT_BYTES)
    wakes: Any = made._wakes
    wakes.delay_s = lambda: disk.commit_s
    return made
