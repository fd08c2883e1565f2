"""The processes of an installation, as proc(5) has them."""

import contextlib
import os
from pathlib import Path

from coldstart_bench.installation import InstallationFailed


def children(pid: int) -> dict[int, list[str]]:
    """Command lines of a process's own children, by process id; what ends meanwhile is left out."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == pid:
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes().decode().split("\0")[:-1]
    return found


def pid_of(supervisor: int, module: str) -> int:
    """The one child that runs `python -m MODULE`. Raises InstallationFailed where there is none."""
    for pid, words in sorted(children(supervisor).items()):
        if words[1:3] == ["-m", module]:
            return pid
    raise InstallationFailed(f"no {module} runs")
