"""Put restored files where an installation has them. What was there is moved aside, never removed."""

import time
from pathlib import Path
from typing import Final

from controlplane.backups import DATABASE, FILES
from service.whole_file import sync

STAGING: Final = ".restore"
MARK: Final = "restoring"  # `kelvin/supervisor/up.py` knows it, too
_DATABASE: Final = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
_OURS: Final = frozenset({STAGING, MARK, "lock"})
_FOREIGN: Final = "lost+found"  # of a file system whose root the data directory is


class NotEmpty(OSError):
    """There is something in the data directory, and nobody said that it may be replaced."""


def place(staging: Path, data: Path, *, replace: bool) -> tuple[tuple[str, ...], str | None]:
    """The names that were put in place, and the directory with what was there. Raises NotEmpty, OSError.

    A mark stands from before the first change until after the last one is durable. Where it stands already, an earlier
    call was cut, and what lies there is half of each: it may be replaced.
    """
    there = sorted({entry.name for entry in data.iterdir()} - _OURS - {_FOREIGN})
    mark = data / MARK
    if there and not replace and not mark.exists():
        raise NotEmpty(f"{data} is not empty ({', '.join(there[:5])}): restore into another one, or say --replace")
    if any((staging / name).exists() for name in _DATABASE[1:]):
        raise OSError("the restored database was not closed: its log is still beside it")
    for path in (staging / DATABASE, *(staging / name for name in FILES)):
        if path.exists():
            sync(path)
    mark.touch(mode=0o600)
    sync(data)
    aside = _move_aside(data)
    placed = []
    for name in (*FILES, DATABASE):
        if (staging / name).exists():
            (data / name).parent.mkdir(mode=0o700, exist_ok=True)
            (staging / name).rename(data / name)
            sync((data / name).parent)
            placed.append(name)
    sync(data)
    mark.unlink()
    sync(data)
    return tuple(placed), None if aside is None else str(aside)


def _move_aside(data: Path) -> Path | None:
    """A database's log must never meet another database: all of what a backup can hold goes."""
    there = [name for name in (*_DATABASE, *FILES) if (data / name).exists()]
    if not there:
        return None
    aside = data / f"replaced-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    while aside.exists():
        aside = aside.with_name(aside.name + "x")
    aside.mkdir(mode=0o700)
    for name in there:
        (aside / name).parent.mkdir(mode=0o700, exist_ok=True)
        (data / name).rename(aside / name)
    sync(aside)
    return aside
