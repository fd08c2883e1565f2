"""How a process starts with all the descriptors that it may have, or ends if it can't start with what it was told."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kelvin.contracts.setting_parser import BadSetting

BAD_SETTING_STATUS: Final = 2  # the supervisor does not try again
STORE_STATUS: Final = 3  # of a check: settings are good, the store does not answer
CHECK: Final = "--check"


def only_checks() -> bool:
    """Whether the program was asked to read its settings and end, as `kelvin doctor` does."""
    return CHECK in sys.argv[1:]


@contextmanager
def refusing_bad_settings() -> Iterator[None]:
    """A `BadSetting` ends the process with its one line on standard error and BAD_SETTING_STATUS."""
    try:
        yield
    except BadSetting as bad:
        sys.stderr.write(f"{bad}\n")
        sys.exit(BAD_SETTING_STATUS)


def raise_descriptors() -> None:
    """Raise the soft limit of open files to the hard limit. Our own settings bound what opens them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
