"""Run programs of the control plane (restore, copy of the database) as processes, and read what they report."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from contracts.wire import decode
from kelvin.checks.guards import is_running
from kelvin.client import DoorClosed

T = TypeVar("T")


def reported(module: str, arguments: Sequence[str], kind: type[T], *, otherwise: str, locks: Sequence[int] = ()) -> T:
    """Run a module and return the report that it prints. If it fails, raise DoorClosed: `otherwise`, and its last line.

    The program holds `locks`, descriptors of ours, until it ends: if this process is killed, the program goes on.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, check=False, pass_fds=locks)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it ended without a word"]
        raise DoorClosed(f"{otherwise}: {lines[-1]}")
    return decode(done.stdout, kind, what=f"report of {module}")


def check_stopped(data: Path) -> None:
    """Raise DoorClosed if a control plane runs in `data`. Without a supervisor it holds no lock on the directory."""
    if is_running(data):
        raise DoorClosed(f"a control plane runs in {data}: stop it first")
