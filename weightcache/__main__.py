"""`python -m weightcache`: the cache agent."""

import sys

from contracts.settings import BadSetting
from service.log import configure_logging
from service.run import run_service
from weightcache.app import run
from weightcache.settings import read_settings


def main() -> None:
    """Exits 0 after a drain; 1 where a setting is wrong or another agent has the data directory."""
    configure_logging("weightcache")
    try:
        settings = read_settings()
        run_service(lambda stop: run(settings, stop), settings.lifeline_fd)
    except BadSetting as error:
        sys.exit(f"weightcache: {error}")
    except BlockingIOError:
        sys.exit("weightcache: another cache agent is running over this data directory")


if __name__ == "__main__":
    main()
