"""A wall clock that is stepped under an installation while it runs.

PYTHONPATH is this directory and the checkout: every Python process of the installation then runs `sitecustomize.py`.
"""

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_CLOCK: Final = Path(__file__).parent


class SteppedClock:
    """The wall clock of Python processes started with `settings`. It is the kernel's until `step` is called."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_bytes(bytes(8))

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables."""
        return {"PYTHONPATH": f"{_CLOCK}{os.pathsep}{ROOT}", "STEPPED_CLOCK": str(self._file)}

    def step(self, seconds: int) -> None:
        """Set the clock so far ahead of the kernel's, or behind it."""
        with self._file.open("r+b") as file:  # the same file: it is mapped
            file.write((seconds * 1_000_000_000).to_bytes(8, "little", signed=True))
