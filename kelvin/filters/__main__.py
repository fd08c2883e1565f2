"""`python -m kelvin.filters`: the process that scans texts."""

from kelvin.filters.settings import from_environment
from kelvin.process.log import configure_logging
from kelvin.process.service_lifecycle import run_service
from kelvin.process.settings import log_level
from kelvin.process.startup import exit_on_bad_setting, is_check_only


def main() -> None:
    """Run until SIGTERM or until the supervisor ends. Exits with 2 for a bad setting."""
    with exit_on_bad_setting():
        configure_logging("filters", log_level())
        settings = from_environment()
        if is_check_only():
            return
        from kelvin.filters.app import serve  # not needed for a check

        run_service(lambda stop: serve(settings, stop), settings.lifeline_fd)


if __name__ == "__main__":
    main()
