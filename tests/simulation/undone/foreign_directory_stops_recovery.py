"""A file system leaves `lost+found` beside the spools: recovery fails on the name, and ships nothing any more."""

import os
from pathlib import Path

from spool.home import sources
from tests.simulation.undone import Undoing

WORLD = "ledger"
SIGN = r"PermissionError.*recovery\.py|PermissionError"


def _sources(root: Path) -> list[str]:
    try:
        with os.scandir(root) as entries:
            found = sorted(each.name for each in entries if each.is_dir(follow_symlinks=False) and each.name[0] != ".")
    except FileNotFoundError:
        return []
    for name in found:
        if name == "lost+found":
            raise PermissionError(13, "Permission denied", str(root / name))
    return found


def undo(undoing: Undoing) -> None:
    undoing.function(sources, _sources)
