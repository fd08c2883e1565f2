"""Spools of a simulation: the committer's steps run on the loop, and the disk can be full or slow."""

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

from spool.disk import Disk
from spool.spool import Spool

COMMIT_S: Final = 0.001
SEGMENT_BYTES: Final = 8 << 10


@dataclass(eq=False)
class FaultyDisk(Disk):
    """`commit_s`: how long a commit takes. `is_full`: nothing can be written. `fails`: what was written may be lost."""

    commit_s: float = COMMIT_S
    is_full: bool = False
    fails: bool = False

    def create(self, path: Path, size: int) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path, size)

    def write(self, fd: int, payload: bytes, offset: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, payload, offset)

    def sync(self, fd: int) -> None:
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class _Wakes:
    """The committer's queue: what is put there is a step of the committer, some time later."""

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
    """In the place of a thread."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._spool: Spool = target.__self__  # type: ignore[attr-defined]

    def start(self) -> None:
        wakes: Any = self._spool._wakes
        wakes.step = self._spool._commit_next

    def join(self) -> None:
        while self._spool._commit_next():
            pass


@contextmanager
def without_threads() -> Iterator[None]:
    """Spools that are opened within the block have no thread of their own."""
    fake = mock.Mock(wraps=threading)
    fake.Thread = _Committer
    with mock.patch("spool.spool.threading", fake), mock.patch("spool.spool.SimpleQueue", _Wakes):
        yield


def open_spool(directory: Path, source: str, disk: FaultyDisk) -> Spool:
    """Open one on that disk."""
    with without_threads():
        made = Spool.open(directory, source, disk=disk, segment_bytes=SEGMENT_BYTES, limit_bytes=64 * SEGMENT_BYTES)
    wakes: Any = made._wakes
    wakes.delay_s = lambda: disk.commit_s
    return made
