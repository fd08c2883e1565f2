"""Stopping a process so that it is stopped: SIGSTOP is sent to all of it, and taken when a thread of it next runs."""

import os
import signal
from pathlib import Path

from tests.eventually import wait


def stop(pid: int) -> None:
    """Returns once no thread of the process runs any more. On busy cores others than the first go on until then. Raises
    ProcessLookupError where it ends instead.
    """
    os.kill(pid, signal.SIGSTOP)

    def is_at_rest() -> bool:
        if has_ended(pid):
            raise ProcessLookupError(pid)
        return is_stopped(pid)

    wait(is_at_rest, f"process {pid} stops")


def is_stopped(pid: int) -> bool:
    """Whether all threads of it are."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # one has just ended
    return bool(stats) and all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def has_ended(pid: int) -> bool:
    """Whether it is gone, or waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
