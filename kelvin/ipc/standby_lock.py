"""Only the holder of this lock may bind versions to standbys. It is a flock on a file of the run directory.

The control plane holds it while it lives. While no control plane holds it, an activator holds it for one decision. A
dead process releases it; a hung one does not.
"""

import asyncio
import fcntl
import os
import time
from typing import Final

from kelvin.contracts.errors import Refused, Unavailable
from kelvin.ipc.socket_directory import SocketDirectory

LOCK_FILE: Final = "decider"
POLL_S: Final = 0.02


class StandbyLock:
    """The held lock. It is released by `close`, or when the process ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __repr__(self) -> str:
        return f"<StandbyLock {'released' if self._fd < 0 else 'held'}>"

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def try_acquire_standby_lock(directory: SocketDirectory) -> StandbyLock | None:
    """Return the lock, or None if it is held, even in this process. Raises OSError if the file can't be opened."""
    fd = os.open(directory.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return StandbyLock(fd)


async def acquire_standby_lock(directory: SocketDirectory, patience_s: float) -> StandbyLock:
    """Wait for the lock. Raises Refused(Unavailable) after `patience_s`, or OSError."""
    limit = time.monotonic() + patience_s
    while (found := try_acquire_standby_lock(directory)) is None:
        if time.monotonic() > limit:
            raise Refused(Unavailable("the standby lock"))
        await asyncio.sleep(POLL_S)
    return found
