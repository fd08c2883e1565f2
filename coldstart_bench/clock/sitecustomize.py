"""A wall clock that somebody outside steps: Python imports a module of this name before anything else.

The file that `STEPPED_CLOCK` names holds nanoseconds, little-endian, which are added to what the kernel says. It is
mapped, so a step is seen at once, also by forked processes. Not stepped are CLOCK_MONOTONIC, which no step moves, the
kernel's own stamps on files, and what reads the clock in C: `datetime.now` (certificates, signatures of S3 requests,
the today of commands and chat templates) and `time.gmtime` without an argument.
"""

import mmap
import os
import time

path = os.environ.get("STEPPED_CLOCK")
if path:
    with open(path, "rb") as file:
        page = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    real_ns = time.time_ns

    def time_ns() -> int:
        """As `time.time_ns`."""
        return real_ns() + int.from_bytes(page[:8], "little", signed=True)

    def seconds() -> float:
        """As `time.time`."""
        return time_ns() / 1e9

    time.time_ns, time.time = time_ns, seconds
