"""A wall clock that is stepped under an installation while it runs.

This directory lies in front of PYTHONPATH: every Python process of the installation then runs `sitecustomize.py`.
"""

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_CLOCK: Final = Path(__file__).parent


class SteppedClock:
    """Of every Python process that is started with `settings`; it is as the kernel's until it is stepped."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_bytes(bytes(8))

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables."""
        return {"PYTHONPATH": f"{_CLOCK}{os.pathsep}{ROOT}", "STEPPED_CLOCK": str(self._file)}

    def step(self, seconds: int) -> None:
        """So far ahead of the kernel's from now on, or behind."""
        with self._file.open("r+b") as file:  # the same file: it is mapped
            file.write((seconds * 1_000_000_000).to_bytes(8, "little", signed=True))
