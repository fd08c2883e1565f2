"""`python -m controlplane`."""

import sys
from functools import partial
from pathlib import Path

from controlplane.check import describe_kept_aside
from controlplane.settings import load
from service.log import configure_logging
from service.private import keep_secrets
from service.run import run_service
from service.settings import log_level
from service.startup import only_checks, refusing_bad_settings


def main() -> None:
    """Exits with 0 when it was told to stop, with 2 for a bad setting."""
    keep_secrets()
    with refusing_bad_settings():
        configure_logging("controlplane", log_level())
        settings = load()
        if only_checks():
            if isinstance(settings.database, Path):
                sys.stderr.write(describe_kept_aside(settings.database))
            return
        from controlplane.app import run  # a check needs none of it

        run_service(partial(run, settings), settings.lifeline_fd)


if __name__ == "__main__":
    main()
