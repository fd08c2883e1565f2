"""The environment of the filters' process, read once."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kelvin.contracts import setting_parser

_NEEDED: Final = ("phonenumbers", "stdnum")  # what the extra brings


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """Where its socket is, and whom it ends with."""

    data: Path
    lifeline_fd: int | None = None

    @property
    def run(self) -> Path:
        """Where the sockets are."""
        return self.data / "run"


def read_settings(env: Mapping[str, str]) -> FilterSettings:
    """Raises `BadSetting`, naming variable, value and rule; also where the extra is not installed."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        raise setting_parser.BadSetting("KELVIN_FILTERS", "on", "needs the extra: pip install kelvin-serving[pii]")
    lifeline = setting_parser.integer(env, "KELVIN_LIFELINE_FD", -1, low=-1)
    return FilterSettings(
        data=Path(setting_parser.text(env, "KELVIN_DATA")).absolute(),
        lifeline_fd=None if lifeline < 0 else lifeline,
    )


def from_environment() -> FilterSettings:
    """This process's settings."""
    return read_settings(os.environ)
