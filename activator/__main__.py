"""`python -m activator`: one process with one event loop."""

from functools import partial

from activator.app.settings import from_environment
from kelvin.process.hardening import protect_memory
from kelvin.process.log import configure_logging
from kelvin.process.service_lifecycle import run_service
from kelvin.process.settings import log_level
from kelvin.process.startup import exit_on_bad_setting, is_check_only, raise_descriptor_limit


def main() -> None:
    """Run the activator. Exits with 0 after a drain, with 2 for a bad setting."""
    protect_memory()
    raise_descriptor_limit()
    with exit_on_bad_setting():
        configure_logging("activator", log_level())
        settings = from_environment()
        if is_check_only():
            return
        from activator.app.app import run  # imported late, because a check does not need it

        run_service(partial(run, settings), settings.lifeline_fd)


if __name__ == "__main__":
    main()
