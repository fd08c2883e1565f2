"""Run programs of the control plane (backup, restore) as processes, and read what they write."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from contracts.wire import decode
from kelvin.checks.guards import is_running
from kelvin.client import DoorClosed

T = TypeVar("T")

_PIECE: Final = 1 << 20


def reported(module: str, arguments: Sequence[str], kind: type[T], *, otherwise: str, locks: Sequence[int] = ()) -> T:
    """Run a module and return the report that it prints. If it fails, raise DoorClosed: `otherwise`, and its last line.

    The program holds `locks`, descriptors of ours, until it ends: if this process is killed, the program goes on.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, check=False, pass_fds=locks)
    _check_ended(done.returncode, done.stderr, otherwise)
    return decode(done.stdout, kind, what=f"report of {module}")


def written(module: str, arguments: Sequence[str], *, otherwise: str, locks: Sequence[int] = ()) -> Iterator[bytes]:
    """Run a module and yield what it writes, as it comes. Raises as `reported`, at the end."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=locks) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while piece := process.stdout.read(_PIECE):
            yield piece
        said = process.stderr.read()
    _check_ended(process.returncode, said, otherwise)


def _check_ended(status: int, said: bytes, otherwise: str) -> None:
    if status != 0:
        lines = said.decode(errors="replace").strip().splitlines() or ["it ended without a word"]
        raise DoorClosed(f"{otherwise}: {lines[-1]}")


def check_stopped(data: Path) -> None:
    """Raise DoorClosed if a control plane runs in `data`. Without a supervisor it holds no lock on the directory."""
    if is_running(data):
        raise DoorClosed(f"a control plane runs in {data}: stop it first")
