"""A wall clock that a bench can step while an installation runs.

PYTHONPATH is this directory plus the checkout, so every Python process of the installation runs `sitecustomize.py`.
"""

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_CLOCK: Final = Path(__file__).parent


class SteppedClock:
    """The wall clock of Python processes started with `settings`. It equals the kernel's until `step` is called."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_bytes(bytes(8))

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables of processes that use this clock."""
        return {"PYTHONPATH": f"{_CLOCK}{os.pathsep}{ROOT}", "STEPPED_CLOCK": str(self._file)}

    def step(self, seconds: int) -> None:
        """Set the clock this many seconds ahead of the kernel's, or behind it."""
        with self._file.open("r+b") as file:  # keep the file: processes have mapped it
            file.write((seconds * 1_000_000_000).to_bytes(8, "little", signed=True))
