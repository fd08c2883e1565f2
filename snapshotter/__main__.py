"""`python -m snapshotter`: the process of the push API."""

import asyncio

from service.log import configure_logging
from service.private import keep_secrets
from service.run import run_service
from service.settings import log_level
from service.startup import only_checks, refusing_bad_settings
from snapshotter.check import check_store
from snapshotter.settings import from_environment


def main() -> None:
    """Run until SIGTERM or the supervisor's end; exits with 2 for a bad setting."""
    with refusing_bad_settings():
        configure_logging("snapshotter", log_level())
        keep_secrets()  # it has the key that signs seals
        settings = from_environment()
        if only_checks():
            asyncio.run(check_store(settings))
            return
        from snapshotter.app import serve  # a check needs none of it

        run_service(lambda stop: serve(settings, stop), settings.lifeline_fd)


if __name__ == "__main__":
    main()
