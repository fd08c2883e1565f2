"""The environment of the filter process, read once."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kelvin.contracts import setting_parser

_NEEDED: Final = ("phonenumbers", "stdnum")  # modules of the extra


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """The data directory, and the descriptor whose end ends the process."""

    data: Path
    lifeline_fd: int | None = None

    @property
    def run(self) -> Path:
        """Return the directory of the sockets."""
        return self.data / "run"


def read_settings(env: Mapping[str, str]) -> FilterSettings:
    """Read the settings. Raises `BadSetting` with variable, value and rule; also if the extra is not installed."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        raise setting_parser.BadSetting("KELVIN_FILTERS", "on", "needs the extra: pip install kelvin-serving[pii]")
    lifeline = setting_parser.integer(env, "KELVIN_LIFELINE_FD", -1, low=-1)
    return FilterSettings(
        data=Path(setting_parser.text(env, "KELVIN_DATA")).absolute(),
        lifeline_fd=None if lifeline < 0 else lifeline,
    )


def from_environment() -> FilterSettings:
    """Return this process's settings. Raises `BadSetting`."""
    return read_settings(os.environ)
