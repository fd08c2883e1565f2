"""Open the database when it is there: PostgreSQL may come up later, or be another control plane's until that ends.

And stay the one who writes to it: a session that was cut has lost the lock, also where nothing is to be written.
"""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from contracts.errors import Refused
from controlplane.clock import Clock
from controlplane.postgres_place import PostgresPlace
from controlplane.store import Database, open_database

log = logging.getLogger(__name__)

AGAIN_S: Final = 1.0
LOOK_S: Final = 5.0


async def open_when_there(place: Path | PostgresPlace, stop: asyncio.Event) -> Database | None:
    """None where `stop` comes first. A file is opened at once, or not at all. Raises as `open_database`."""
    if isinstance(place, Path):
        return open_database(place)
    told = ""
    while not stop.is_set():
        try:
            return await asyncio.to_thread(open_database, place)
        except OperationalError as error:
            why = str(error.orig).strip()
            if why != told:
                log.warning("the database can't be opened; asking again", extra={"database": str(place), "error": why})
                told = why
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), AGAIN_S)
    return None


async def keep_writing(database: Database, clock: Clock) -> None:
    """Again and again make sure of the session that writes; ends by being cancelled.

    So the lock is ours again soon after a session was cut; and who was replaced meanwhile learns of it.
    """
    is_away = False
    while True:
        await clock.sleep(LOOK_S)
        was_away = is_away
        try:
            await database.write(_nothing, repeated=True)
            is_away = False
        except Refused:
            is_away = True
        if is_away is not was_away:
            log.warning("the database is away" if is_away else "the database is back")


def _nothing(connection: Connection) -> None:
    """But that there is a transaction."""
