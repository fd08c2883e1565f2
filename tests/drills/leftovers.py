"""Shared memory that must not be left; what else must not is in `coldstart_bench/harness/installation.py`."""

import contextlib
from pathlib import Path
from typing import Final

import psutil

_SHARED: Final = Path("/dev/shm")
_NEIGHBOURS: Final = "PostgreSQL."  # of servers that tests beside us kill; a drill has none


def shared_memory() -> frozenset[str]:
    """Names in it that nobody has open or mapped, and no neighbour has left.

    Kelvin's own memory has none, and goes with its processes.
    """
    if not _SHARED.is_dir():
        return frozenset()
    # Before it is known who has them: others come and go.
    # Shared memory is a file. A directory is where a neighbour's tests keep what they call a disk.
    names = frozenset(
        path.name for path in _SHARED.iterdir() if not path.name.startswith(_NEIGHBOURS) and not path.is_dir()
    )
    return names - _in_use() if names else names


def _in_use() -> frozenset[str]:
    """By a process that lives, a neighbour of ours as well."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found.update(Path(mapped.path).name for mapped in process.memory_maps() if str(_SHARED) in mapped.path)
            found.update(Path(opened.path).name for opened in process.open_files() if str(_SHARED) in opened.path)
    return frozenset(found)
