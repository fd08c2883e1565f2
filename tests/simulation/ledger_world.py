"""World: usage records travel from spools to the ledger, its journal and its backups, and are restored.

Spools, shippers, recovery, ledger, totals, journal, closings, backups and restore are the product's, with files in
memory. Processes die between any two steps, clocks step, and the disk is full for a moment.
"""

import asyncio
import functools
import os
import sqlite3
from collections.abc import Coroutine, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
from msgspec import UNSET
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from controlplane.backup.backup_directory import claim_backup_directory, list_backups
from controlplane.backup.backup_schedule import BackupLoop
from controlplane.backup.backups import FILES, Backups
from controlplane.backup.restore_program import restore
from controlplane.backup.restore_target import CannotRestore
from controlplane.billing.billing_report import close_month, spent_micros
from controlplane.billing.price_book import default_price_book
from controlplane.clock import SystemClock
from controlplane.db.ledger_schema import chains, closings, conflicts, lifetime_records, request_records
from controlplane.ledger.ledger_journal import LedgerJournal
from controlplane.ledger.policy.month import month_bounds_us
from controlplane.ledger.policy.rating import PriceBook
from controlplane.ledger.usage_ledger import Ledger
from controlplane.ledger_check.ledger_verification import verify_all_chains
from kelvin.contracts.accounting.usage import LifetimeRecord, RecordOrigin, RequestRecord
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.serving.control_messages import LifetimeBatch, RequestBatch, RunningLifetimes
from kelvin.contracts.wire import decode, encode
from kelvin.spool import Shipper, Spool, recover
from kelvin.spool.leftover_recovery import leftover_records
from kelvin.spool.segment_disk import segment_name, segments
from kelvin.spool.segment_reader import DAMAGED
from tests.simulation.core.databases import migrated, opened, shared_statements
from tests.simulation.core.faulty_spool import FaultyDisk, Killed, close_files, open_spool
from tests.simulation.core.world import World, operation

TENANTS: Final = ("acme", "beta")
MONTHS: Final = ("2025-11", "2025-12", "2026-01")
MODELS: Final = ("m", "acme/m")
TOKENS: Final = (5, 0, 5000)
SOURCES_MAX: Final = 5
PLACES: Final = ("before the journal", "behind the journal", "at the commit", "behind the commit")
STEPS_S: Final = (-3600.0, 3600.0, 86_400.0, 40 * 86_400.0, 4 * 365 * 86_400.0)
CALM_S: Final = 120
_DEVICES: Final = ("cpu-1", "h100")


@functools.cache
def _book() -> PriceBook:
    return default_price_book()


class Source:
    """A process that writes usage records."""

    def __init__(self, spool: Spool, shipper: Shipper, task: "asyncio.Task[None]", *, writes_lives: bool) -> None:
        self.spool = spool
        self.shipper = shipper
        self.task = task
        self.writes_lives = writes_lives


class LedgerWorld(World):
    """Some sources, one control plane, and one backup directory."""

    name = "ledger"
    steps_max = 30

    async def start(self) -> None:
        """Create a data directory as after a first start, and a directory for its backups."""
        self.data, self.place = self.directory / "data", self.directory / "place"
        self.data.mkdir()
        for name in FILES:
            if name != "installation":
                (self.data / name).parent.mkdir(exist_ok=True)
                (self.data / name).write_text(f"the {name}")
        (self.data / "kelvin.db").write_bytes(migrated())
        claim_backup_directory(self.place, self.data)
        self.book = _book()
        self.sources: list[Source] = []
        self.acknowledged: dict[tuple[str, int], RequestRecord | LifetimeRecord] = {}
        self.withheld: list[RequestRecord] = []
        # In a small world, records share rows of totals and can cancel each other out.
        is_small = self.random.random() < 0.5
        self.tenants, self.months = TENANTS[: 1 if is_small else 2], MONTHS[1:2] if is_small else MONTHS
        self.models, self.tokens = MODELS[: 1 if is_small else 2], TOKENS[: 1 if is_small else 3]
        self.orphans = 0.6 if is_small else 0.3
        self.made = self.restored = 0
        self.dies_at: str | None = None
        self.commit_fails = self.loses_answer = False
        self.damaged: set[Path] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.is_up = self.is_at_rest = False
        await self._open()

    # The control plane.

    async def _open(self) -> None:
        self.journal_disk = FaultyDisk()
        self.journal = LedgerJournal(self.place, disk=self.journal_disk, segment_bytes=8 << 10)
        self.database = opened(self.data / "kelvin.db")
        event.listen(self.database.engine, "commit", self._committing)
        self.ledger = Ledger(self.database, self.journal)
        self.backups = Backups(self.data, self.database, self.journal)
        self.schedule = BackupLoop(
            self.backups, self.database, self.journal, self.place, every_s=60.0, keep_days=30, clock=SystemClock()
        )
        try:
            await self.ledger.write_due_marks()
        except Refused:  # the next transaction does it
            self.record_event("the journal is not settled")
        except Killed:
            self.is_up = True
            self._die()
            return
        self.is_up = True

    def _die(self) -> None:
        """Kill the control plane: uncommitted data is lost. It opens again soon."""
        if not self.is_up:
            return
        self.record_event("the control plane dies")
        self.dies_at, self.commit_fails, self.loses_answer = None, False, False
        self.is_up = False
        self.journal_disk.is_dead = True
        event.remove(self.database.engine, "commit", self._committing)
        self.database.engine.dispose()
        close_files(self.place)
        self._start(self._reopen())

    async def _reopen(self) -> None:
        await asyncio.sleep(self.random.uniform(0.1, 3.0))
        await self._open()

    def _committing(self, connection: object) -> None:
        if self.dies_at == "at the commit":
            raise Killed(self.dies_at)
        if self.commit_fails:
            self.commit_fails = False
            raise OperationalError("COMMIT", {}, OSError(28, "database or disk is full"))

    async def _post(self, payloads: Sequence[bytes], writes_lives: bool) -> None:
        """Store a batch as the ledger's route does."""
        await asyncio.sleep(self.random.uniform(0.001, 0.02))
        if not self.is_up:
            raise Refused(Unavailable("the control plane"))
        dies_at = self.dies_at
        self.journal_disk.dies_at = dies_at if dies_at in PLACES[:2] else None
        try:
            if writes_lives:
                lives = tuple(decode(each, LifetimeRecord) for each in payloads)
                await self.ledger.append_lifetimes(LifetimeBatch(records=lives))
            else:
                requests = tuple(decode(each, RequestRecord) for each in payloads)
                await self.ledger.append_requests(RequestBatch(records=requests))
            if dies_at == "behind the commit":
                raise Killed(dies_at)
        except Killed as killed:
            self._die()
            raise Refused(Unavailable("the control plane")) from killed
        if self.loses_answer:
            self.loses_answer = False
            raise Refused(Unavailable("the control plane"))

    # Sources.

    def _begin_source(self, *, writes_lives: bool) -> Source:
        self.made += 1
        name = f"{'supervisor' if writes_lives else 'activator'}-{self.made}"
        opened_spool = open_spool(self.data / "spool", name, FaultyDisk())
        shipper = Shipper(opened_spool, functools.partial(self._post, writes_lives=writes_lives))
        source = Source(
            opened_spool, shipper, self.start_loop(shipper.run(), f"shipper {name}"), writes_lives=writes_lives
        )
        self.sources.append(source)
        return source

    def _source(self, random: Random, *, writes_lives: bool) -> Source:
        known = [each for each in self.sources if each.writes_lives is writes_lives]
        if known and (len(self.sources) >= SOURCES_MAX or random.random() < 0.8):
            return random.choice(known)
        return self._begin_source(writes_lives=writes_lives)

    async def _append(self, source: Source, record: RequestRecord | LifetimeRecord) -> None:
        named = msgspec.structs.replace(record, source=source.spool.source)

        def make(sequence: int) -> bytes:
            return encode(msgspec.structs.replace(named, sequence=sequence))

        sequence = await source.spool.append(make)
        self.acknowledged[source.spool.source, sequence] = msgspec.structs.replace(named, sequence=sequence)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _moment_us(self, random: Random) -> int:
        begin_us, end_us = month_bounds_us(random.choice(self.months))
        at_us = random.choice((begin_us, end_us - 1))
        return min(at_us, int(self.clocks.wall() * 1e6)) if self.clocks.ahead_s >= 0 else at_us

    @operation(12)
    async def serve(self, random: Random) -> None:
        """Finish some requests and append their records. Some have an orphan record, too."""
        source = self._source(random, writes_lives=False)
        for _ in range(random.choice((1, 1, 3, 12))):
            record = self._request(random)
            if random.random() < self.orphans:  # its runtime lost the activator
                tokens = random.choice((0, record.completion_tokens, record.completion_tokens))
                orphan = msgspec.structs.replace(
                    record, origin=RecordOrigin.ORPHAN, completion_tokens=tokens, outcome="orphaned", once=UNSET
                )
                self._start(self._append(self._source(random, writes_lives=False), orphan))
                if random.random() < 0.7:
                    self.withheld.append(record)
                    continue
            self._start(self._append(source, record))

    @operation(4)
    async def tell_late(self, random: Random) -> None:
        """Append the late records of a lost activator."""
        source, withheld = self._source(random, writes_lives=False), self.withheld
        self.withheld = withheld[(count := random.randint(1, 4)) :]
        for record in withheld[:count]:
            self._start(self._append(source, record))

    def _request(self, random: Random) -> RequestRecord:
        ended_us, outcome = self._moment_us(random), random.choice(("ok", "ok", "ok", "cancelled", "overloaded"))
        tokens = random.choice(self.tokens) if outcome != "overloaded" else 0
        return RequestRecord(
            request_id=f"req-{random.randrange(1 << 40)}",
            origin=RecordOrigin.ACTIVATOR,
            source="",
            sequence=0,
            tenant=random.choice(self.tenants),
            model=random.choice(self.models),
            version="f" * 64,
            key_id="key",
            runtime_id=f"rt-{random.randrange(4)}",
            started_at_us=ended_us - 500,
            ended_at_us=ended_us,
            queued_us=3,
            outcome=outcome,
            status=200,
            stream=True,
            prompt_tokens=tokens * 2,
            cached_tokens=tokens,
            completion_tokens=tokens,
            device_us=tokens * 10,
            once=f"{random.randrange(3)}" if random.random() < 0.3 and (outcome == "ok" or tokens) else UNSET,
            degraded=random.choice((UNSET, UNSET, "cap-output=5", "cached=3")),
        )

    @operation(4)
    async def end_replica(self, random: Random) -> None:
        """Record the life of a replica. Some replicas report it while running."""
        life = self._life(random)
        if random.random() < 0.3:  # a pod that is lost together with its final record
            await self._tell_lives(life)
        else:
            self._start(self._append(self._source(random, writes_lives=True), life))

    def _life(self, random: Random) -> LifetimeRecord:
        died_us, figure = self._moment_us(random), random.choice((0, 1, 3_600_000_000))
        return LifetimeRecord(
            runtime_id=f"rt-{random.randrange(1 << 40)}",
            source="",
            sequence=0,
            pid=1,
            tenant=random.choice(self.tenants),
            model=random.choice(("m", "n")),
            version="f" * 64,
            device_class=random.choice(_DEVICES),
            born_at_us=died_us - 4 * figure,
            died_at_us=died_us,
            total_us=4 * figure,
            standby_us=figure,
            restore_us=figure,
            active_us=figure,
            idle_us=figure,
            requests=0,
            exit_status=0,
            cpu_us=figure,
            max_rss_kb=1,
        )

    async def _tell_lives(self, life: LifetimeRecord) -> None:
        """Report the life of a running pod."""
        if self.is_up:
            word = msgspec.structs.replace(life, source="pod-1", sequence=1)
            try:
                await self.ledger.record_running_replicas(
                    RunningLifetimes(records=(word,)), int(self.clocks.wall() * 1e6)
                )
            except (Refused, OperationalError, Killed):
                self._die_if_killed()

    @operation(2)
    async def record_lost_replicas(self, random: Random) -> None:
        """Record replicas that have not reported for long, by their last report."""
        if self.is_up:
            try:
                await self.ledger.record_lost_replicas(int((self.clocks.wall() - random.choice((0.0, 3600.0))) * 1e6))
            except (Refused, OperationalError, Killed):
                self._die_if_killed()

    def _die_if_killed(self) -> None:
        if self.dies_at is not None:
            self._die()

    @operation(4)
    async def kill_source(self, random: Random) -> None:
        """Kill a source. Its last write may be torn."""
        if self.sources:
            self._kill(random.choice(self.sources), random)

    @operation(1)
    async def kill_at_birth(self, random: Random) -> None:
        """Kill a new source before its first record."""
        self._kill(self._begin_source(writes_lives=random.random() < 0.5), random)

    def _kill(self, source: Source, random: Random) -> None:
        self.sources.remove(source)
        self._loops.remove(source.task)
        source.task.cancel()
        directory = source.spool.path
        source.spool._wakes.step = None  # type: ignore[attr-defined]
        close_files(directory)
        match random.randrange(6):
            case 0 if firsts := segments(directory):  # a write that was not acknowledged
                with (directory / segment_name(firsts[-1])).open("ab") as segment:
                    segment.write(random.randbytes(random.randrange(1, 200)))
            case 1:
                (directory / "position").write_bytes(random.choice((b"", bytes(12), b"torn")))
            case 2:
                (directory / "stray").write_text("x")
            case _:
                return

    @operation(3)
    async def recover(self, random: Random) -> None:
        """Ship the records that dead processes left."""
        await self._recover()

    @operation(2)
    async def start_again(self, random: Random) -> None:
        """Read the leftover lifetime records, as a starting supervisor does."""
        for record in leftover_records(self.data / "spool", lambda source: source.startswith("supervisor")):
            decode(record, LifetimeRecord)

    async def _recover(self) -> None:
        await recover(
            self.data / "spool",
            lambda source: functools.partial(self._post, writes_lives=source.startswith("supervisor")),
        )

    @operation(1)
    async def leave_foreign_entries(self, random: Random) -> None:
        """Create entries in the directories, as file systems and people do."""
        spools = self.data / "spool"
        spools.mkdir(exist_ok=True)
        (spools / "lost+found").mkdir(exist_ok=True)
        (spools / "README").write_text("x")
        (self.place / "lost+found").mkdir(exist_ok=True)
        (self.place / "notes.txt").write_text("x")

    # The life of the control plane.

    @operation(4)
    async def die(self, random: Random) -> None:
        """Kill the control plane, now or during the next batch."""
        if random.random() < 0.3:
            self._die()
        else:
            self.dies_at = random.choice(PLACES)

    @operation(2)
    async def fail_commit(self, random: Random) -> None:
        """Let the next commit fail, or lose its answer."""
        self.commit_fails = random.random() < 0.7
        self.loses_answer = not self.commit_fails

    @operation(1)
    async def fill_disk(self, random: Random) -> None:
        """Let the journal's disk be full for a moment."""
        disk = self.journal_disk
        disk.is_full = True
        self.loop.call_later(random.uniform(0.1, 5.0), setattr, disk, "is_full", False)

    @operation(2)
    async def step_clock(self, random: Random) -> None:
        """Step the wall clock."""
        self.clocks.ahead_s += random.choice(STEPS_S) if self.clocks.ahead_s == 0 else -self.clocks.ahead_s

    @operation(4)
    async def close_a_month(self, random: Random) -> None:
        """Close a tenant's month that is over."""
        if not self.is_up:
            return
        tenant, month, now_us = random.choice(self.tenants), random.choice(self.months), int(self.clocks.wall() * 1e6)
        try:
            await self.ledger.write_closing(
                lambda connection: close_month(connection, self.book, tenant, month, live=None, now_us=now_us)
            )
        except (Refused, OperationalError, Killed):
            self._die_if_killed()

    @operation(4)
    async def back_up(self, random: Random) -> None:
        if self.is_up:
            try:
                await self.schedule.make_backup()
            except (Refused, OperationalError, Killed):
                self._die_if_killed()

    @operation(1)
    async def damage_a_backup(self, random: Random) -> None:
        """Truncate the newest backup if an older one is intact."""
        whole = [path for _, path in list_backups(self.place) if path not in self.damaged]
        if len(whole) > 1:
            newest = max(whole, key=lambda path: path.stat().st_mtime_ns)
            os.truncate(newest, random.randrange(newest.stat().st_size))
            self.damaged.add(newest)

    @operation(2)
    async def restore(self, random: Random) -> None:
        """Restore everything to another directory, and compare."""
        self.check((a_restored_ledger_is_the_same,))

    def check_restored(self, *, is_last: bool) -> None:
        """Restore and compare, if the control plane runs and there is an intact backup."""
        if not self.is_up or not any(path not in self.damaged for _, path in list_backups(self.place)):
            return
        self.restored += 1
        fresh = self.directory / f"restored-{self.restored}"
        try:
            with shared_statements():
                report = restore(self.place, fresh, replace=False, accept_unsound=False)
        except CannotRestore as error:
            raise AssertionError(f"can't be restored: {error}") from error
        self.record_event(f"restored: {report.replayed} from the journal, {report.unshipped} unshipped")
        kept, back = Contents(self.data / "kelvin.db"), Contents(fresh / "kelvin.db")
        assert not report.missing, f"{report.missing} entries are missing"
        for name, of in kept.rows.items():
            lost = sorted(of.keys() - back.rows[name].keys())
            assert not lost, f"{name} {lost[0]} is not restored"
            more = back.rows[name].keys() - of.keys()
            unknown = sorted(key for key in more if key not in self.acknowledged and name != "closing")
            assert not unknown, f"{name} {unknown[0]} comes from nowhere"
            assert name != "closing" or not more, f"closing {sorted(more)[0]} was never made"
            changed = [key for key in of.keys() & back.rows[name].keys() if of[key] != back.rows[name][key]]
            assert not changed, f"{name} {sorted(changed)[0]} is restored as another one"
        if not report.unshipped and kept.rows == back.rows:
            assert kept.chains == back.chains, "a chain is restored with another end"
        if is_last and all(back.rows[name].keys() == of.keys() for name, of in kept.rows.items()):
            assert kept.bills(self.book) == back.bills(self.book), "the bill is restored as another one"

    # Rest.

    async def quiesce(self) -> None:
        """End all faults. Every acknowledged record reaches the ledger."""
        self.dies_at, self.commit_fails, self.loses_answer = None, False, False
        self.clocks.ahead_s = 0.0
        await asyncio.sleep(6.0)
        for _ in range(CALM_S):
            await self._recover()
            if not self.tasks and all(source.shipper.backlog == 0 for source in self.sources):
                break
            await asyncio.sleep(1.0)
        self._die()
        await asyncio.sleep(6.0)
        self.is_at_rest = True

    async def stop(self) -> None:
        """End all processes in order."""
        await self.end_loops()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for source in self.sources:
            source.spool.close()
        if self.is_up:
            self.journal.close()
            self.database.close()


class Contents:
    """The content of a ledger, without the order of its arrival."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with closing(sqlite3.connect(path)) as connection:
            self.rows: dict[str, dict[tuple[Any, ...], tuple[Any, ...]]] = {
                "request": _by_name(
                    connection,
                    "source, sequence, request_id, origin, outcome, completion_tokens, ended_at_us, device_us",
                    request_records.name,
                ),
                "lifetime": _by_name(
                    connection, "source, sequence, runtime_id, total_us, device_class", lifetime_records.name
                ),
                "closing": _by_name(connection, "tenant, month, report", closings.name),
            }
            self.chains = connection.execute(
                f"SELECT tenant, month, links, chain FROM {chains.name} ORDER BY 1, 2"
            ).fetchall()
            self.aside = [reason for (reason,) in connection.execute(f"SELECT reason FROM {conflicts.name}")]

    def bills(self, book: PriceBook) -> dict[tuple[str, str], int]:
        """Return the cost of each tenant's months."""
        with closing(opened(self._path)) as database, database.engine.connect() as connection:
            return {
                (tenant, month): spent_micros(connection, book, tenant, month) for tenant in TENANTS for month in MONTHS
            }


def _by_name(connection: sqlite3.Connection, columns: str, table: str) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    return {row[:2]: row[2:] for row in connection.execute(f"SELECT {columns} FROM {table}")}


# Invariants.


def everything_acknowledged_is_in_the_ledger(world: LedgerWorld) -> None:
    """Each acknowledged record is in the ledger once, as it was written. No record is set aside."""
    contents = Contents(world.data / "kelvin.db")
    assert not contents.aside, f"kept aside: {contents.aside[0][0]}"
    for key, record in world.acknowledged.items():
        name = "request" if isinstance(record, RequestRecord) else "lifetime"
        row = contents.rows[name].get(key)
        if (
            row is None
            and name == "lifetime"
            and record.runtime_id in {each[0] for each in contents.rows[name].values()}
        ):
            continue  # its last report was recorded before
        assert row is not None, f"{name} {key} was acknowledged and is not in the ledger"
        assert row[0] == (record.request_id if isinstance(record, RequestRecord) else record.runtime_id), (
            f"{key} differs"
        )


def the_ledger_is_sound(world: LedgerWorld) -> None:
    """Chains, totals and closed bills match the rows."""
    with world.database.engine.connect() as connection:
        fault = verify_all_chains(connection).fault
    assert fault is None, fault


def is_kept(name: str) -> bool:
    """Return whether recovery keeps that file: it is foreign, or has unreadable bytes."""
    return name == "stray" or name.endswith(DAMAGED)


def nothing_is_left_in_spools(world: LedgerWorld) -> None:
    """All records were shipped, and the spools of dead processes are gone."""
    alive = {source.spool.source for source in world.sources}
    left = [path for path in (world.data / "spool").glob("*-*") if path.name not in alive]
    left = [path for path in left if any(not is_kept(each.name) for each in path.iterdir())]
    assert not left, f"{left[0].name} is left: {sorted(each.name for each in left[0].iterdir())}"


def a_restored_ledger_is_the_same(world: LedgerWorld) -> None:
    """A restored ledger is sound, with all acknowledged records, the same closed months and the same bill."""
    world.check_restored(is_last=world.is_at_rest)


LedgerWorld.at_rest = (
    everything_acknowledged_is_in_the_ledger, the_ledger_is_sound, nothing_is_left_in_spools,
    a_restored_ledger_is_the_same,
)  # fmt: skip
