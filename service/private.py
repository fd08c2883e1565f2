"""Keep what a process knows in the process: no core dump, and no other process of the user reads its memory."""

import ctypes
import os
import resource
from typing import Final

_PR_SET_DUMPABLE: Final = 4  # prctl(2)


def keep_secrets() -> None:
    """For a process that sees keys, at its start: PR_SET_DUMPABLE 0, and RLIMIT_CORE 0 for what it starts.

    The first also closes `/proc/PID/mem` and `ptrace` to others of the same user. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
