"""Keep the logs of child processes bounded: one file that grows, and one that holds what was before it.

A child keeps its descriptor, so its file is copied and truncated rather than renamed. The descriptor appends
(O_APPEND), so the child goes on at the beginning. A line that is written between copy and truncation is lost.
"""

import asyncio
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

LIMIT_BYTES: Final = 64 << 20
LOOK_S: Final = 30.0
SUFFIX: Final = ".1"


async def rotate_forever(directory: Path) -> None:
    """Look at each log again and again. A log that can't be rotated stays as it is until the next look."""
    while True:
        await asyncio.to_thread(_rotate_all, directory)
        await asyncio.sleep(LOOK_S)


def _rotate_all(directory: Path) -> None:
    for path in directory.glob("*.log"):
        try:
            rotate(path, LIMIT_BYTES)
        except OSError as error:
            log.warning("a log can't be rotated", extra={"file": path.name, "error": repr(error)})


def rotate(path: Path, limit_bytes: int) -> None:
    """Move what `path` holds to `path.1` if it is larger than the limit.

    Where there is no room for the copy, `path.1` is removed, which makes room. A log of more than twice the limit is
    emptied then without a copy, so that a full disk does not fill further. Raises OSError: `path` is as it was then,
    but what `path.1` held may be lost.
    """
    size = path.stat().st_size
    if size <= limit_bytes:
        return
    older = path.with_name(path.name + SUFFIX)
    try:
        with path.open("rb") as current, older.open("wb") as copy:
            shutil.copyfileobj(current, copy)
            copy.flush()
            copy.write(current.read())  # what was written while the rest was copied
            copy.flush()
            os.truncate(path, 0)
    except OSError as error:
        with suppress(OSError):
            older.unlink()
        if size <= 2 * limit_bytes:
            raise
        os.truncate(path, 0)
        log.warning("a log was emptied without a copy", extra={"file": path.name, "error": repr(error)})
