"""One decider at a time: only who holds this gives standbys their versions. A flock on a file of the run directory.

The control plane holds it for as long as it lives, an activator while none does, for one decision. Whoever dies has let
it go, and who hangs has not.
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
    """Held until it is closed, or the process ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __repr__(self) -> str:
        return f"<StandbyLock {'let go' if self._fd < 0 else 'of the decider'}>"

    def close(self) -> None:
        """Let it go. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def try_acquire_standby_lock(directory: SocketDirectory) -> StandbyLock | None:
    """None where another one, or another part of this process, holds it. Raises OSError where the file can't be."""
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
    """Wait for it. Raises Refused(Unavailable) after `patience_s`, OSError."""
    limit = time.monotonic() + patience_s
    while (found := try_acquire_standby_lock(directory)) is None:
        if time.monotonic() > limit:
            raise Refused(Unavailable("the decider's place"))
        await asyncio.sleep(POLL_S)
    return found
