"""Manage the directory of scheduled backups: its owner, the names of its backups, and how a backup is written whole.

A file name has the time when its backup began and a growing number: `kelvin-20261121T160000Z-17.backup`. The number
tells which backup is newer, because clocks step. Files of older programs have no number, and count as older than all
that have one.

A directory belongs to one installation. Another installation, or a fresh one on a new disk, would remove backups that
the first one needs.
"""

import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from controlplane.backup.backups import INSTALLATION_FILE, remove_draft_copies
from kelvin.contracts.accounting.backup_reports import SUFFIX
from kelvin.contracts.setting_parser import BadSetting
from kelvin.process.atomic_file import pending_file, remove_pending_files, write_atomic

SETTING: Final = "KELVIN_BACKUP"
_PREFIX: Final = "kelvin-"
_STAMP: Final = "%Y%m%dT%H%M%SZ"
_MODE: Final = 0o600
_INSTALLATION_NAME: Final = re.compile(r"[0-9a-f]{32}")
_NAME: Final = re.compile(rf"{_PREFIX}([0-9]{{8}}T[0-9]{{6}}Z)(?:-([0-9]{{1,18}}))?{re.escape(SUFFIX)}")


def claim_backup_directory(place: Path, data: Path) -> None:
    """Create the directory and write the same installation name into it and into `data`. Raises BadSetting if the
    directory belongs to another installation.
    """
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours, theirs = _try_read(data / INSTALLATION_FILE), _try_read(place / INSTALLATION_FILE)
        if theirs is not None and theirs != ours:
            rule = "holds the backups of another installation: run `kelvin restore`, or choose another directory"
            raise BadSetting(SETTING, str(place), rule)
        if ours is None:
            ours = secrets.token_hex(16)
            _write(data / INSTALLATION_FILE, ours)
        if theirs is None:
            _write(place / INSTALLATION_FILE, ours)
        remove_pending_files(place, f"{_PREFIX}*")
        remove_draft_copies(place)
    except OSError as error:
        raise BadSetting(SETTING, str(place), f"can't be used: {error.strerror}") from error


def list_backups(place: Path) -> Sequence[tuple[int, Path]]:
    """Return the time (whole seconds since 1970) and file of each backup, the newest last. Other files are left out."""
    return [(moment, path) for _, moment, path in _ordered(place)]


def next_backup_name(place: Path, moment_s: int) -> str:
    """Return the file name of a backup that begins at `moment_s` and counts as newer than all existing ones."""
    return backup_name(moment_s, 1 + max((number for number, _, _ in _ordered(place)), default=0))


def backup_name(moment_s: int, number: int = 0) -> str:
    """Return the file name of a backup that began at `moment_s`. Older programs wrote no number."""
    stamp = datetime.fromtimestamp(moment_s, UTC).strftime(_STAMP)
    return f"{_PREFIX}{stamp}{f'-{number}' if number else ''}{SUFFIX}"


def write_backup(path: Path, pieces: Iterable[bytes]) -> int:
    """Write the file durably, whole or not at all. Return its size in bytes. Raises OSError, and as `pieces`."""
    with pending_file(path, _MODE) as draft:
        size = sum(draft.file.write(piece) for piece in pieces)
        draft.commit()
    return size


def _ordered(place: Path) -> list[tuple[int, int, Path]]:
    """Return number, time and file of each backup, ascending."""
    found = []
    for path in place.glob(f"{_PREFIX}*{SUFFIX}"):
        named = _NAME.fullmatch(path.name)
        if named is not None and path.is_file():
            with suppress(ValueError):  # no such date
                moment = datetime.strptime(named[1], _STAMP).replace(tzinfo=UTC)
                found.append((int(named[2] or 0), int(moment.timestamp()), path))
    return sorted(found)


def _try_read(path: Path) -> str | None:
    """Return the installation's name; None without the file. Raises BadSetting if the file holds no name."""
    try:
        name = path.read_text("latin-1").strip()
    except FileNotFoundError:
        return None
    if _INSTALLATION_NAME.fullmatch(name) is None:
        what = f"{path} holds no installation name: copy the file from the data directory, the backup place or a backup"
        raise BadSetting(SETTING, str(path.parent), what)
    return name


def _write(path: Path, text: str) -> None:
    write_atomic(path, text.encode() + b"\n", _MODE)
