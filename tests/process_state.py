"""Stop a process and wait until it has stopped: each thread handles SIGSTOP only when it next runs."""

import os
import signal
from pathlib import Path

from tests.eventually import wait


def stop(pid: int) -> None:
    """Send SIGSTOP and return once all threads are stopped. Raises ProcessLookupError if the process ends instead."""
    os.kill(pid, signal.SIGSTOP)

    def is_at_rest() -> bool:
        if has_ended(pid):
            raise ProcessLookupError(pid)
        return is_stopped(pid)

    wait(is_at_rest, f"process {pid} stops")


def is_stopped(pid: int) -> bool:
    """Return whether all threads of the process are stopped."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has just ended
    return bool(stats) and all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def has_ended(pid: int) -> bool:
    """Return whether the process is gone, or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
