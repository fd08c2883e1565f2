"""Start a process: raise its limit of open files, or exit on a bad setting."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kelvin.contracts.setting_parser import BadSetting

BAD_SETTING_STATUS: Final = 2  # the supervisor does not restart such a process
STORE_STATUS: Final = 3  # exit status of `--check`: settings are good, the store does not answer
CHECK: Final = "--check"


def is_check_only() -> bool:
    """Return whether the program shall only read its settings and exit, as `kelvin doctor` requests."""
    return CHECK in sys.argv[1:]


@contextmanager
def exit_on_bad_setting() -> Iterator[None]:
    """On `BadSetting`, print its one line to standard error and exit with BAD_SETTING_STATUS."""
    try:
        yield
    except BadSetting as bad:
        sys.stderr.write(f"{bad}\n")
        sys.exit(BAD_SETTING_STATUS)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit. Our own settings bound how many files are opened."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
