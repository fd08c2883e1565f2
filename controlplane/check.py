"""What `kelvin doctor` is told of the ledger beside the settings."""

import sqlite3
from contextlib import closing
from pathlib import Path


def describe_kept_aside(path: Path) -> str:
    """Return how many usage records the ledger keeps aside, as a sentence; "" for none, or without a ledger."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            (count,) = database.execute("SELECT count(*) FROM ledger_conflicts").fetchone()
    except sqlite3.Error:
        return ""
    return f"{count} can't be read or contradict others, and are kept aside" if count else ""
