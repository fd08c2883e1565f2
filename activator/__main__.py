"""`python -m activator`: one process, one event loop."""

import resource
import sys
from functools import partial

from activator.app import run
from activator.settings import from_environment
from contracts.settings import BadSetting
from service.log import configure_logging
from service.run import run_service


def main() -> int:
    """The exit status: 0 after a drain, 2 for a bad setting."""
    try:
        settings = from_environment()
    except BadSetting as bad:
        sys.stderr.write(f"{bad}\n")
        return 2
    configure_logging("activator")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the bound on connections is a setting of ours
    run_service(partial(run, settings), settings.lifeline_fd)
    return 0


if __name__ == "__main__":
    sys.exit(main())
