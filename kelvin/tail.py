"""Read the last lines of a file without reading what comes before them."""

import os
from pathlib import Path
from typing import Final

_BLOCK_BYTES: Final = 64 << 10


def last_lines(path: Path, count: int) -> list[str]:
    """Return at most `count` lines, the oldest first; bytes that are no UTF-8 are replaced. Raises OSError."""
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
    lines = b"".join(reversed(blocks)).splitlines()[-count:]  # as bytes: in text, U+2028 would end a line, too
    return [line.decode(errors="replace") for line in lines]
