"""`python -m weightcache`: the cache agent."""

import sys
from typing import Final

from kelvin.process.log import configure_logging
from kelvin.process.service_lifecycle import run_service
from kelvin.process.settings import log_level
from kelvin.process.startup import exit_on_bad_setting, is_check_only, raise_descriptor_limit
from weightcache.app.settings import read_settings

# How long a thread that returns from a call waits for the GIL behind a busy one; Python's default is 5 ms
THREAD_SWITCH_S: Final = 0.0005


def main() -> None:
    """Run the agent. Exits with 0 after a drain, 2 for a bad setting, 1 if another agent has the data directory."""
    raise_descriptor_limit()
    try:
        with exit_on_bad_setting():
            configure_logging("weightcache", log_level())
            settings = read_settings()
            if is_check_only():
                return
            from weightcache.app.app import run  # not needed for a check

            sys.setswitchinterval(THREAD_SWITCH_S)
            run_service(lambda stop: run(settings, stop), settings.lifeline_fd)
    except BlockingIOError:
        sys.exit("weightcache: another cache agent is running over this data directory")


if __name__ == "__main__":
    main()
