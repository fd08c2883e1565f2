"""Open the database when it is there: PostgreSQL may come up later, or be another control plane's until that ends.

And stay the one who writes to it: a session that was cut has lost the lock, also where nothing is to be written.
"""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from threading import Lock
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
    """None where `stop` comes first. A file is opened at once, or not at all; of what is cancelled nothing stays open.
    Raises as `open_database`.
    """
    if isinstance(place, Path):
        return open_database(place)
    told = ""
    while not stop.is_set():
        opening = _Opening(place)
        try:
            return await asyncio.to_thread(opening.run)
        except asyncio.CancelledError:
            opening.leave()
            raise
        except OperationalError as error:
            why = str(error.orig).strip()
            if why != told:
                log.warning("the database can't be opened; asking again", extra={"database": str(place), "error": why})
                told = why
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), AGAIN_S)
    return None


class _Opening:
    """In a thread, which goes on where nobody waits for it any more: whoever lost the lead can't stay for a migration.
    What is open then is closed at once, or its session would keep whoever leads from the lock.
    """

    def __init__(self, place: PostgresPlace) -> None:
        self._place = place
        self._turn = Lock()
        self._opened: Database | None = None
        self._is_left = False

    def run(self) -> Database:
        """Blocking. Raises as `open_database`."""
        opened = open_database(self._place)
        with self._turn:
            self._opened, is_left = opened, self._is_left
        if is_left:
            opened.close()
        return opened

    def leave(self) -> None:
        """Nobody takes it: also where it is open, and whoever waited was cancelled before it was told."""
        with self._turn:
            opened, self._is_left = self._opened, True
        if opened is not None:
            opened.close()


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
