"""How we run our own programs. `-P`: a user's current directory may hold a folder called like one of our packages."""

import sys
from collections.abc import Sequence


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def runs_module(command: Sequence[str], module: str) -> bool:
    """Whether a process's command line is `python_command(module, ...)`."""
    return list(command[1:4]) == ["-P", "-m", module]
