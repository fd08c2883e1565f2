"""Replace the wall clock of this process by one that another process can step. Python imports this module at startup.

The file named by `STEPPED_CLOCK` holds nanoseconds (little-endian) that are added to the kernel's time. It is mapped,
so forked processes see a step at once, too. Not stepped are CLOCK_MONOTONIC, as with a real step; the kernel's time
stamps of files; and code that reads the clock in C: `datetime.now` (certificates, signatures of S3 requests, today's
date in commands and chat templates) and `time.gmtime` without an argument.
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
        """Return the stepped time in nanoseconds."""
        return real_ns() + int.from_bytes(page[:8], "little", signed=True)

    def seconds() -> float:
        """Return the stepped time in seconds."""
        return time_ns() / 1e9

    time.time_ns, time.time = time_ns, seconds
