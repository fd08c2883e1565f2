"""Rotate the logs of child processes and read their last lines. Each log has a size limit and one older part.

A child keeps its descriptor, so its file is copied and truncated instead of renamed. The descriptor appends (O_APPEND),
so the child then writes at the start of the file. A line written between copy and truncation is lost.
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
ROTATION_INTERVAL_S: Final = 30.0
SUFFIX: Final = ".1"
_BLOCK_BYTES: Final = 64 << 10


async def rotate_forever(directory: Path) -> None:
    """Rotate a directory's logs every `ROTATION_INTERVAL_S`. A log that can't be rotated stays until the next time."""
    while True:
        await asyncio.to_thread(_rotate_all, directory)
        await asyncio.sleep(ROTATION_INTERVAL_S)


def _rotate_all(directory: Path) -> None:
    for path in directory.glob("*.log"):
        try:
            rotate(path, LIMIT_BYTES)
        except OSError as error:
            log.warning("a log can't be rotated", extra={"file": path.name, "error": repr(error)})


def rotate(path: Path, limit_bytes: int) -> None:
    """Move the contents of `path` to `path.1` if they are larger than the limit.

    If copying fails, such as on a full disk, `path.1` is removed. A log of more than twice the limit is then emptied
    without a copy, so that it does not fill the disk further. A smaller one stays: raises OSError.
    """
    size = path.stat().st_size
    if size <= limit_bytes:
        return
    older = path.with_name(path.name + SUFFIX)
    try:
        with path.open("rb") as current, older.open("wb") as copy:
            shutil.copyfileobj(current, copy)
            copy.flush()
            copy.write(current.read())  # bytes that were written during the copy
            copy.flush()
            os.truncate(path, 0)
    except OSError as error:
        with suppress(OSError):
            older.unlink()
        if size <= 2 * limit_bytes:
            raise
        os.truncate(path, 0)
        log.warning("a log was emptied without a copy", extra={"file": path.name, "error": repr(error)})


def last_lines(path: Path, count: int) -> list[str]:
    """Return at most `count` last lines, the oldest first. Invalid UTF-8 is replaced. Raises OSError."""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        blocks: list[bytes] = []
        newlines = 0
        while start > 0 and newlines <= count:
            size = min(_BLOCK_BYTES, start)
            start -= size
            file.seek(start)
            blocks.append(file.read(size))
            newlines += blocks[-1].count(b"\n")
    lines = b"".join(reversed(blocks)).splitlines()[-count:]  # bytes: in text, U+2028 would end a line, too
    return [line.decode(errors="replace") for line in lines]
