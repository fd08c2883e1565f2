"""Settings that every process reads from the environment."""

import logging
import os
from collections.abc import Mapping
from typing import Final

from kelvin.contracts import setting_parser

LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def log_level(env: Mapping[str, str] = os.environ) -> int:
    """Return the lowest level that is logged. Raises BadSetting."""
    return LEVELS[setting_parser.choice(env, "KELVIN_LOG_LEVEL", "info", tuple(LEVELS))]
