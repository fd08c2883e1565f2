"""Keep secrets from others: no core dump, no other process of the user reads our memory, no other user our files."""

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
    """Call it at the start of a process that sees keys. Sets PR_SET_DUMPABLE to 0, and RLIMIT_CORE to 0 for child
    processes.

    The first also closes `/proc/PID/mem` and `ptrace` to other processes of the user. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def make_private(directory: Path) -> bool:
    """Take from a directory of this user all that group and others may do, and say so in the log.

    Return whether it is its owner's alone now. Raises OSError.
    """
    stat = directory.stat()
    if not stat.st_mode & _OTHERS:
        return True
    if stat.st_uid != os.geteuid():
        return False
    directory.chmod(stat.st_mode & 0o700)
    log.warning("the data directory was open to others", extra={"mode_was": f"{stat.st_mode & 0o7777:04o}"})
    return True
