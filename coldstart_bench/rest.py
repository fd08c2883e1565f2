"""Are processes at rest? A parked standby warms up first; what is measured is a start of one that had the time to."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

QUIET_S: Final = 0.6  # longer than a standby is parked before it warms up
_NOISE_TICKS: Final = 1  # of some 10 ms: what a loop that waits takes


class Rest:
    """Told their processor time again and again, says whether they have taken none for `quiet_s`. Pure."""

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._since_s = 0.0
        self._ticks: int | None = None

    def sees(self, ticks: int, now: float) -> bool:
        """`ticks` of all of them at `now`, in seconds. Fewer than before: another process is there."""
        if self._ticks is None or not 0 <= ticks - self._ticks <= _NOISE_TICKS:
            self._ticks, self._since_s = ticks, now
        return now - self._since_s >= self._quiet_s


def cpu_ticks(pids: Iterable[int]) -> int:
    """User and system time of processes, in the kernel's ticks (proc(5)); one that has ended counts nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total
