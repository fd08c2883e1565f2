"""Build the command lines of our own programs.

`-P` keeps the current directory out of the import path: it may hold a folder named like one of our packages.
"""

import sys
from collections.abc import Sequence


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module` with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def runs_module(command: Sequence[str], module: str) -> bool:
    """Return whether a process's command line is `python_command(module, ...)`."""
    return list(command[1:4]) == ["-P", "-m", module]
