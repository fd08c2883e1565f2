"""Signs in a process's log that it did not end cleanly."""

import re
from typing import Final

_SIGNS: Final = re.compile(
    r"Traceback|Task exception was never retrieved|Task was destroyed|Unclosed|was never awaited|Exception ignored in"
)


def find_unclean_exit(log: str) -> list[str]:
    """Return the log lines that show an unclean end: a traceback, a leftover task or connection."""
    return [line for line in log.splitlines() if _SIGNS.search(line)]
