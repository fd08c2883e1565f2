"""What a process that ended in order must not have left in its log."""

import re
from typing import Final

_SIGNS: Final = re.compile(
    r"Traceback|Task exception was never retrieved|Task was destroyed|Unclosed|was never awaited|Exception ignored in"
)


def find_unclean_exit(log: str) -> list[str]:
    """Return the lines of a log that tell of an end which was not orderly: a traceback, a task or connection left."""
    return [line for line in log.splitlines() if _SIGNS.search(line)]
