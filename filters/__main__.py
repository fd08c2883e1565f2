"""`python -m filters`: the process that looks at texts."""

from filters.settings import from_environment
from service.log import configure_logging
from service.run import run_service
from service.settings import log_level
from service.startup import only_checks, refusing_bad_settings


def main() -> None:
    """Run until SIGTERM or the supervisor's end; exits with 2 for a bad setting."""
    with refusing_bad_settings():
        configure_logging("filters", log_level())
        settings = from_environment()
        if only_checks():
            return
        from filters.app import serve  # a check needs none of it

        run_service(lambda stop: serve(settings, stop), settings.lifeline_fd)


if __name__ == "__main__":
    main()
