"""The place of scheduled backups: whose it is, which backups lie there, and how one gets there whole.

A place belongs to one installation: another one, or a fresh one on a new disk, would thin out what the first needs.
"""

import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from contracts.backup import SUFFIX
from contracts.settings import BadSetting
from controlplane.backups import INSTALLATION, sweep
from service.whole_file import drafted, remove_drafts, write_whole

SETTING: Final = "KELVIN_BACKUP"
_PREFIX: Final = "kelvin-"
_STAMP: Final = "%Y%m%dT%H%M%SZ"
_MODE: Final = 0o600


def claim_place(place: Path, data: Path) -> None:
    """Make the place, and let it and `data` name one another. Raises BadSetting where it is another one's."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours, theirs = _try_read(data / INSTALLATION), _try_read(place / INSTALLATION)
        if theirs is not None and theirs != ours:
            rule = "holds the backups of another installation: `kelvin restore` brings them back, or choose another"
            raise BadSetting(SETTING, str(place), rule)
        if ours is None:
            ours = secrets.token_hex(16)
            _write(data / INSTALLATION, ours)
        if theirs is None:
            _write(place / INSTALLATION, ours)
        remove_drafts(place, f"{_PREFIX}*")
        sweep(place)
    except OSError as error:
        raise BadSetting(SETTING, str(place), f"can't be used: {error.strerror}") from error


def backups_in(place: Path) -> Sequence[tuple[int, Path]]:
    """Moment (whole seconds since 1970) and file of each backup, ascending."""
    found = ((_moment_of(path), path) for path in place.glob(f"{_PREFIX}*{SUFFIX}"))
    return sorted((moment, path) for moment, path in found if moment is not None)


def name_of(moment_s: int) -> str:
    """The file name of a backup that was begun then."""
    return f"{_PREFIX}{datetime.fromtimestamp(moment_s, UTC).strftime(_STAMP)}{SUFFIX}"


def write_backup(path: Path, pieces: Iterable[bytes]) -> int:
    """Write the file, whole and durable or not at all; its size. Raises OSError and what `pieces` raise."""
    with drafted(path, _MODE) as draft:
        size = sum(draft.file.write(piece) for piece in pieces)
        draft.keep()
    return size


def _moment_of(path: Path) -> int | None:
    text = path.name.removeprefix(_PREFIX).removesuffix(SUFFIX)
    try:
        return int(datetime.strptime(text, _STAMP).replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None


def _try_read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None


def _write(path: Path, text: str) -> None:
    write_whole(path, text.encode() + b"\n", _MODE)
