"""Make backups at an interval. Old backups and journal entries are removed only after the new backup is whole."""

import asyncio
import logging
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from controlplane.backup.archive import BadBackup, read_index
from controlplane.backup.backup_directory import (
    SETTING,
    claim_backup_directory,
    list_backups,
    next_backup_name,
    write_backup,
)
from controlplane.backup.backups import BackupCancelled, Backups, BackupSnapshot
from controlplane.backup.retention_policy import DAY_S, MIN_BACKUPS, choose_kept_backups
from controlplane.clock import Clock, ClockStepDetector
from controlplane.db.database import Database
from controlplane.ledger.ledger_journal import LedgerJournal
from kelvin.contracts.backoff import ExponentialBackoff
from kelvin.contracts.errors import Refused
from kelvin.contracts.setting_parser import BadSetting

log = logging.getLogger(__name__)

RETRY_S: Final = 5.0
RETENTION_PAUSE_US: Final = 3_600_000_000  # no backup is removed for so long after the clock may have been wrong


class BackupLoop:
    """Owns the backups in `place`. `run` ends by being cancelled, and then removes an unfinished backup."""

    def __init__(
        self,
        backups: Backups,
        database: Database,
        journal: LedgerJournal,
        place: Path,
        *,
        every_s: float,
        keep_days: int,
        clock: Clock,
    ) -> None:
        self._backups = backups
        self._database = database
        self._journal = journal
        self._place = place
        self._every_s = every_s
        self._keep_days = keep_days
        self._clock = clock
        self._stop = threading.Event()
        self._state: tuple[object, ...] = ()  # of database and files when the newest backup began
        existing_backups = list_backups(place)
        self._steps = ClockStepDetector(clock)
        self._retention_from_us = 0  # by the clock that never steps
        if existing_backups and clock.wall_s() - existing_backups[-1][0] > DAY_S:
            self._suspend_retention()  # the installation was off for a day, or the clock is ahead
        written = (path.stat().st_mtime for _, path in existing_backups)
        self.done_at_s: float = max((at_s for at_s in written if at_s <= time.time()), default=0.0)

    def __repr__(self) -> str:
        return f"<BackupLoop {self._place} every_s={self._every_s}>"

    def age_s(self) -> float:
        """Return seconds since the newest backup was finished, or was last found to be up to date."""
        return time.time() - self.done_at_s

    async def run(self) -> None:
        """Make backups until cancelled.

        After a failure, and while files of the installation are missing, the next backup follows after RETRY_S, then
        after twice as long each time, up to the interval.
        """
        self._stop.clear()  # may be set by an earlier run that ended with an error
        pauses, retries = ExponentialBackoff(RETRY_S, self._every_s), 0
        try:
            while True:
                began_us = self._clock.monotonic_us()
                is_done = True
                try:
                    await self.make_backup()
                except (Refused, OSError) as error:
                    log.error("no backup could be made", extra={"place": str(self._place), "error": repr(error)})
                    is_done = False
                # At the first start the activator is still making its CA. Without a CA, files stay missing for good.
                retries = 0 if is_done and self._backups.has_all_files() else retries + 1
                wait_s = pauses.delay_s(retries) if retries else self._every_s
                spent_s = (self._clock.monotonic_us() - began_us) / 1e6
                await self._clock.sleep(max(0.0, wait_s - spent_s))
        finally:
            self._stop.set()

    async def make_backup(self) -> Path | None:
        """Make a backup. Return its file; None if nothing has changed or `run` is ending. Raises Refused, OSError."""
        if self._current_state() == self._state and await asyncio.to_thread(self._touch_newest):
            self.done_at_s = time.time()
            return None
        moment = await self._backups.begin()
        state = self._current_state()  # later writes may be missing from the backup
        try:
            path, size = await asyncio.to_thread(self._write, moment)
        except BackupCancelled:
            return None
        self._state, self.done_at_s = state, time.time()
        try:
            await asyncio.to_thread(self._apply_retention)
        except OSError as error:  # the backup is whole, and the next one tries again
            log.warning("the journal can't be trimmed", extra={"place": str(self._place), "error": repr(error)})
        log.info("backup", extra={"file": path.name, "bytes": size, "journal_after": moment.journal_after})
        return path

    def _touch_newest(self) -> bool:
        """Set the newest backup's time to now, because it is still up to date. Return whether there is a backup."""
        existing_backups = list_backups(self._place)
        if existing_backups:
            existing_backups[-1][1].touch()
        return bool(existing_backups)

    def _write(self, moment: BackupSnapshot) -> tuple[Path, int]:
        path = self._place / next_backup_name(self._place, moment.made_at_us // 1_000_000)
        return path, write_backup(path, self._backups.pieces(moment, self._place, self._stop))

    def _current_state(self) -> tuple[object, ...]:
        return self._database.writes, self._backups.files_state()

    def _suspend_retention(self) -> None:
        self._retention_from_us = self._clock.monotonic_us() + RETENTION_PAUSE_US

    def _apply_retention(self) -> None:
        """Remove old backups, but never the newest MIN_BACKUPS, and trim the journal to the oldest of those.

        To a clock that is years ahead, all others would look old. So none is removed until the clock has not stepped
        for an hour.
        """
        if by_us := self._steps.stepped_us():
            log.warning("the clock stepped; no backup is removed for an hour", extra={"by_us": by_us})
            self._suspend_retention()
        is_trusted = self._clock.monotonic_us() >= self._retention_from_us
        existing_backups = list_backups(self._place)
        newest = [path for _, path in existing_backups[-MIN_BACKUPS:]]
        kept_moments = choose_kept_backups(
            (moment for moment, _ in existing_backups), self._clock.wall_s(), self._keep_days
        )
        for moment, path in existing_backups:
            if is_trusted and moment not in kept_moments and path not in newest:
                try:
                    path.unlink()
                except OSError as error:  # the others are removed, and the journal is trimmed
                    log.warning("an old backup can't be removed", extra={"file": path.name, "error": str(error)})
        reached = [_journal_after(path) for path in newest]
        if len(reached) == MIN_BACKUPS:
            self._journal.trim(min(reached))


def _journal_after(path: Path) -> int:
    """Return the last journal entry that the backup contains. If unreadable, return 0: the whole journal is kept."""
    try:
        with path.open("rb") as archive:
            return read_index(archive).journal_after or 0
    except (BadBackup, OSError) as error:
        log.warning("a backup can't be read", extra={"file": path.name, "error": str(error)})
        return 0


async def open_backups(stack: AsyncExitStack, data: Path, place: Path | None) -> LedgerJournal | None:
    """Return the journal in the backup place; the stack closes it. Return None without a place. Raises BadSetting."""
    if place is None:
        return None
    await asyncio.to_thread(claim_backup_directory, place, data)
    try:
        journal = LedgerJournal(place, used=await asyncio.to_thread(_last_backed_up_entry, place))
    except OSError as error:
        raise BadSetting(SETTING, str(place), f"can't be written: {error.strerror}") from error
    stack.callback(journal.close)
    return journal


def _last_backed_up_entry(place: Path) -> int:
    """Return the last journal entry that any backup in the place contains. A lost journal continues after it."""
    return max((_journal_after(path) for _, path in list_backups(place)), default=0)
