"""Protect secrets: no core dumps, no memory access by other processes of the user, no file access by other users."""

import ctypes
import logging
import os
import resource
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_OTHERS: Final = 0o077
_PR_SET_DUMPABLE: Final = 4  # prctl(2)


def protect_memory() -> None:
    """Call it when a process that sees keys starts. Raises OSError. Sets PR_SET_DUMPABLE to 0, which also closes
    `/proc/PID/mem` and `ptrace` to other processes of the user, and RLIMIT_CORE to 0 for child processes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def make_private(directory: Path) -> bool:
    """Remove the access of group and others from a directory of this user, and log that. Return whether only its owner
    can use it now. Raises OSError.
    """
    stat = directory.stat()
    if not stat.st_mode & _OTHERS:
        return True
    if stat.st_uid != os.geteuid():
        return False
    directory.chmod(stat.st_mode & 0o700)
    log.warning("the data directory was open to others", extra={"mode_was": f"{stat.st_mode & 0o7777:04o}"})
    return True
