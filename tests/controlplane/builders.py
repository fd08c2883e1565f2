"""Build domain values with defaults, and the stores of a control plane over a database."""

import sqlite3
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from controlplane.audit.audit_rows import Actor
from controlplane.backup.backup_directory import claim_backup_directory, write_backup
from controlplane.backup.backup_schedule import BackupLoop
from controlplane.backup.backups import Backups
from controlplane.backup.restore_program import restore
from controlplane.clock import Clock, SystemClock
from controlplane.ledger.ledger_journal import LedgerJournal
from controlplane.ledger.usage_ledger import Ledger
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.key_store import KeyStore
from controlplane.registry.policy.domain import VersionKey
from controlplane.registry.registry import Registry
from controlplane.registry.tenant_store import TenantStore
from kelvin.contracts.accounting.backup_reports import RestoreReport
from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.serving.control_messages import ConcurrencyStat, RequestBatch, Stats, VersionRegistration
from kelvin.spool.segment_disk import SegmentDisk
from tests.controlplane.database_backends import database as opened_database
from tests.controlplane.usage_records import request_record

TENANT = "default"
NOW_S = 1_700_000_000
BY = Actor(key_id="k", tenant=TENANT, scopes=(), request_id="req_1")


def digest(letter: str) -> str:
    """Return a version digest: the letter 64 times."""
    return letter * 64


def registration(
    model: str = "m", letter: str = "a", *, tenant: str = TENANT, max_streams: int = 64
) -> VersionRegistration:
    """Return a registration as the snapshotter sends it for a small model."""
    return VersionRegistration(
        tenant=tenant,
        model=model,
        version=digest(letter),
        limits=Limits(max_input_tokens=100, max_output_tokens=100, max_streams=max_streams),
        architecture="LlamaForCausalLM",
        weight_bytes=1000,
        total_bytes=4096,
        kv_bytes_per_token=16,
        max_positions=128,
    )


def key(model: str = "m", letter: str = "a") -> VersionKey:
    """Return the key of the version that `registration` registers."""
    return VersionKey(TENANT, model, digest(letter))


def stats(which: VersionKey, concurrency: float = 1.0, requests: int = 1) -> Stats:
    """Return one load report of one activator."""
    stat = ConcurrencyStat(
        tenant=which.tenant, model=which.model, version=which.version, concurrency=concurrency, requests=requests
    )
    return Stats(activator="activator-0", stats=(stat,))


class World:
    """The stores of a control plane over the database of a data directory. `has_journal` adds a ledger journal."""

    def __init__(
        self,
        data: Path,
        place: Path | None = None,
        *,
        has_journal: bool = False,
        feed: FeedHub | None = None,
        disk: SegmentDisk | None = None,
    ) -> None:
        self.data, self.place, self.has_journal = data, place or data.with_name("place"), has_journal
        self.feed = feed or FeedHub()
        self._disk = disk
        self.open()

    def open(self) -> None:
        """Open all stores, as at a start."""
        self.database = opened_database(self.data)
        self.journal = LedgerJournal(self.place, disk=self._disk) if self.has_journal else None
        self.ledger = Ledger(self.database, self.journal)
        self.backups = Backups(self.data, self.database, self.journal)
        self.keys, self.tenants = KeyStore(self.database, self.feed), TenantStore(self.database, self.feed)
        self.registry = Registry(self.database, self.feed)

    async def load(self) -> None:
        """Create the first keys if there are none, and load all models."""
        await self.keys.bootstrap(self.data, NOW_S)
        await self.registry.load()

    async def enter(self, *numbers: int) -> None:
        """Append one request record for each number, in one batch."""
        await self.ledger.append_requests(RequestBatch(records=tuple(request_record(number) for number in numbers)))

    async def back_up(self, path: Path) -> Path:
        """Write a backup to `path` as the socket sends it."""
        snapshot = await self.backups.begin()
        write_backup(path, self.backups.pieces(snapshot, self.data))
        return path

    def backup_loop(self, *, every_s: float = 60.0, clock: Clock | None = None) -> BackupLoop:
        """Return a backup schedule that writes to `place`."""
        assert self.journal is not None
        return BackupLoop(
            self.backups, self.database, self.journal, self.place,
            every_s=every_s, keep_days=7, clock=clock or SystemClock(),
        )  # fmt: skip

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
        self.database.close()


@asynccontextmanager
async def opened_registry(data: Path, feed: FeedHub | None = None) -> AsyncIterator[Registry]:
    """Open a registry over a real file and load it. It has the default tenant."""
    with closing(World(data, feed=feed)) as world:
        await world.load()
        yield world.registry


@asynccontextmanager
async def installed(root: Path, *, has_journal: bool = True) -> AsyncIterator[World]:
    """Open the data directory `root`/data with keys, a version, a CA and a ledger. Backups go to `root`/place."""
    data, place = root / "data", root / "place"
    data.mkdir()
    for name in ("ca.pem", "tls/ca.key", "attest.key", "once.key"):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_text(f"the {name}")
    claim_backup_directory(place, data)
    with closing(World(data, place, has_journal=has_journal)) as world:
        await world.load()
        await world.registry.register(registration(), NOW_S)
        yield world


async def back_up_and_enter_one(root: Path) -> Path:
    """Return the path of a backup. The journal beside it has one more entry."""
    async with installed(root) as world:
        made = await world.backup_loop().make_backup()
        assert made is not None
        await world.enter(1)
    return made


def ids(database: Path) -> list[str]:
    """Return the request ids in a ledger file, in their order."""
    with closing(sqlite3.connect(database)) as connection:
        return [row[0] for row in connection.execute("SELECT request_id FROM ledger_requests ORDER BY sequence")]


def restore_backup(source: Path, data: Path, *, replace: bool = False, accept_unsound: bool = False) -> RestoreReport:
    """Restore with the given options."""
    return restore(source, data, replace=replace, accept_unsound=accept_unsound)


async def refusal(work: Awaitable[object]) -> Failure:
    """Return the failure with which `work` is refused."""
    with pytest.raises(Refused) as refused:
        await work
    return refused.value.failure
