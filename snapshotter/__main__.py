"""`python -m snapshotter`: the process of the push API."""

from service.log import configure_logging
from service.run import run_service
from service.settings import log_level
from service.startup import refusing_bad_settings
from snapshotter.app import serve
from snapshotter.settings import from_environment


def main() -> None:
    """Run until SIGTERM or the supervisor's end; exits with 2 for a bad setting."""
    with refusing_bad_settings():
        configure_logging("snapshotter", log_level())
        settings = from_environment()
        run_service(lambda stop: serve(settings, stop), settings.lifeline_fd)


if __name__ == "__main__":
    main()
