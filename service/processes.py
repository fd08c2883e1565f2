"""What the kernel knows of a process."""

import os
import time
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def age_ns(pid: int) -> int:
    """Nanoseconds since the process was forked, to the kernel's tick (10 ms). Raises FileNotFoundError."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    born_ns = int(fields[19]) * 10**9 // _TICKS_PER_S  # field 22, starttime, counted from field 3
    return max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - born_ns)
