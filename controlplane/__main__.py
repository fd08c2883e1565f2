"""Run the control plane: `python -m controlplane`."""

import sqlite3
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

from controlplane.app.settings import load
from controlplane.billing.price_book import read_price_book
from kelvin.process.hardening import protect_memory
from kelvin.process.log import configure_logging
from kelvin.process.service_lifecycle import run_service
from kelvin.process.settings import log_level
from kelvin.process.startup import exit_on_bad_setting, is_check_only


def main() -> None:
    """Read the settings and run until a stop signal. Exits with 0 after a stop, with 2 for a bad setting."""
    protect_memory()
    with exit_on_bad_setting():
        configure_logging("controlplane", log_level())
        settings = load()
        if is_check_only():
            read_price_book(settings.price_book)
            if isinstance(settings.database, Path):
                sys.stderr.write(describe_kept_aside(settings.database))
            return
        from controlplane.app.app import run  # slow to import, and a check of the settings does not need it

        run_service(partial(run, settings), settings.lifeline_fd)


def describe_kept_aside(path: Path) -> str:
    """Return for `kelvin doctor` how many usage records the ledger keeps aside; "" for none, or without a ledger."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            (count,) = database.execute("SELECT count(*) FROM ledger_conflicts").fetchone()
    except sqlite3.Error:
        return ""
    return f"{count} can't be read or contradict others, and are kept aside" if count else ""


if __name__ == "__main__":
    main()
