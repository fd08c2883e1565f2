"""Repairs of the spools, the ledger and the restore."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine

from controlplane.backup import restore_program as restore
from controlplane.backup.backups import UNSHIPPED
from controlplane.ledger.ledger_journal import JournalEntry, LedgerJournal
from controlplane.ledger.usage_totals import TotalsUpsert
from kelvin.spool.frame import decode_frame
from kelvin.spool.leftover_recovery import leftover_records
from kelvin.spool.segment_disk import segment_name, segments
from kelvin.spool.source_directory import readable_sources, sources
from tests.simulation.undone import Undoing, repair


@repair(r"^start_again: raised: ValueError")
def empty_source_stops_the_start(undoing: Undoing) -> None:
    """A process is killed before its first record, so its source has no segment. Reading leftover records raises, and a
    supervisor does not start any more.
    """

    def left(directory: Path, wanted: Callable[[str], bool]) -> Iterator[bytes]:
        for source in readable_sources(directory):
            if wanted(source):
                yield from _payloads(directory / source)

    undoing.function(leftover_records, left)


def _payloads(directory: Path) -> Iterator[bytes]:
    firsts = segments(directory)
    for first, following in zip(firsts, [*firsts[1:], None], strict=True):
        content = (directory / segment_name(first)).read_bytes()
        offset, sequence = 0, first
        while sequence != following and (frame := decode_frame(content, offset)) is not None:
            if frame.sequence != sequence:
                break
            yield frame.payload
            offset, sequence = frame.end, sequence + 1


@repair("PermissionError")
def foreign_directory_stops_recovery(undoing: Undoing) -> None:
    """A file system has `lost+found` beside the spools. Recovery fails on that name and ships nothing any more."""

    def every(root: Path) -> list[str]:
        try:
            with os.scandir(root) as entries:
                found = sorted(
                    each.name for each in entries if each.is_dir(follow_symlinks=False) and each.name[0] != "."
                )
        except FileNotFoundError:
            return []
        for name in found:
            if name == "lost+found":
                raise PermissionError(13, "Permission denied", str(root / name))
        return found

    undoing.function(sources, every)


@repair(r"^a_restored_ledger_is_the_same: (closing|request|lifetime|can.t be restored)", seed=20_233_492_257)
def journal_replays_what_never_committed(undoing: Undoing) -> None:
    """The journal is written before COMMIT, and a restore replays uncommitted entries, too. A month that was never
    closed is restored as closed, with another bill.
    """

    def drop_after(self: LedgerJournal, position: int) -> None:
        return

    undoing.method(LedgerJournal, "drop_after", drop_after)


@repair(r"^a_restored_ledger_is_the_same: can't be restored: .* closed bill's", seed=644_063_370_884)
def restore_enters_unshipped_records_first(undoing: Undoing) -> None:
    """A record was in a spool at the backup, and was stored after its month was closed. The restore stores it before
    the closing: the closed bill does not match the rows, and nothing can be restored.
    """
    repaired = restore.replay

    def replay(engine: Engine, entries: Iterable[JournalEntry]) -> int:
        directory = Path(str(engine.url.database)).parent
        return repaired(engine, [*restore._decode_spooled(directory / UNSHIPPED, 0), *entries])

    undoing.name(restore, "replay", replay)


@repair(r"not sound: total of day|total of day", seed=142_497_921_215)
def totals_keep_empty_rows(undoing: Undoing) -> None:
    """A sum that returns to zero from below keeps its row. A sound ledger is then reported as unsound."""

    def run(self: TotalsUpsert, connection: Connection, sums: Mapping[tuple[Any, ...], Sequence[Any]]) -> None:
        if not sums:
            return
        rows = [dict(zip(self._columns, (*name, *figures), strict=True)) for name, figures in sums.items()]
        connection.execute(self._statements[connection.dialect.name], rows)
        named = [f"of_{name}" for name in self._names]
        if less := [name for name, figures in sums.items() if min(map(_figure, figures)) < 0]:
            connection.execute(self._delete_zero, [dict(zip(named, name, strict=True)) for name in less])

    undoing.method(TotalsUpsert, "run", run)


def _figure(value: object) -> int:
    return value if isinstance(value, int) else 0
