"""Find leftover shared memory. `coldstart_bench/harness/installation.py` finds other leftovers."""

import contextlib
from pathlib import Path
from typing import Final

import psutil

_SHARED: Final = Path("/dev/shm")
_NEIGHBOURS: Final = "PostgreSQL."  # names of servers that other tests kill; a drill has none


def shared_memory() -> frozenset[str]:
    """Return the names in shared memory that no process has open or mapped, and that other tests did not leave.

    Kelvin's own memory has no name, and goes with its processes.
    """
    if not _SHARED.is_dir():
        return frozenset()
    # Names are read before their users: other processes come and go. Shared memory is a file. Other tests keep
    # directories there as disks.
    names = frozenset(
        path.name for path in _SHARED.iterdir() if not path.name.startswith(_NEIGHBOURS) and not path.is_dir()
    )
    return names - _in_use() if names else names


def _in_use() -> frozenset[str]:
    """Return the names that a live process has open or mapped, in this and other tests."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found.update(Path(mapped.path).name for mapped in process.memory_maps() if str(_SHARED) in mapped.path)
            found.update(Path(opened.path).name for opened in process.open_files() if str(_SHARED) in opened.path)
    return frozenset(found)
