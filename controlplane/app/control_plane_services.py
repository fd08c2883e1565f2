"""Open the services that a control plane has with either backend: ledger, registry, keys, audit log and feed."""

from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from controlplane.api.access_api import AccessStores
from controlplane.app.settings import Settings
from controlplane.audit.audit_log import AuditLog
from controlplane.backup.backup_directory import SETTING
from controlplane.backup.backup_schedule import BackupLoop, open_backups
from controlplane.backup.backups import Backups, remove_draft_copies
from controlplane.billing.spending_feed import SpendingFeed
from controlplane.clock import Clock
from controlplane.db.database import Database
from controlplane.db.json_columns import UnreadableColumn
from controlplane.ledger.closed_months import currencies
from controlplane.ledger.ledger_journal import LedgerJournal, OlderDatabase
from controlplane.ledger.policy.rating import PriceBook
from controlplane.ledger.usage_ledger import Ledger
from controlplane.ledger_check.check_runner import CheckRunner
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.key_files import BadKeyFile
from controlplane.registry.key_store import KeyStore
from controlplane.registry.registry import Registry
from controlplane.registry.tenant_store import TenantStore
from controlplane.tasks import Tasks
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.machine import Machine
from kelvin.contracts.setting_parser import BadSetting
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.telemetry.policy.instruments import MetricKind
from kelvin.telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class ControlPlaneServices:
    """The open services. The backend enters `tasks` after it has opened what they use; leaving `tasks` ends them."""

    settings: Settings
    clock: Clock
    telemetry: Telemetry
    directory: SocketDirectory
    database: Database
    journal: LedgerJournal | None
    price_book: PriceBook
    ledger: Ledger
    feed: FeedHub
    check_runner: CheckRunner
    registry: Registry
    access_stores: AccessStores
    audit_log: AuditLog
    spending: SpendingFeed
    tasks: Tasks


async def open_services(
    stack: AsyncExitStack,
    settings: Settings,
    clock: Clock,
    price_book: PriceBook,
    telemetry: Telemetry,
    directory: SocketDirectory,
    database: Database,
    machine: Machine | None,
) -> ControlPlaneServices:
    """Open the services. On return all stored state is in memory and in the feed. Raises BadSetting."""
    journal = await open_backups(stack, settings.data, settings.backup)
    ledger, feed = Ledger(database, journal), FeedHub(machine=machine)
    try:
        await ledger.write_due_marks()
    except Refused:
        pass  # the backup place is full or away: the next transaction writes the marks before anything else
    except OlderDatabase as older:
        restore = f"kelvin restore {settings.backup} --data {settings.data} --replace"
        rule = f"{older}. Don't put a copy of the database back by hand. Run `{restore}`, or choose another place"
        raise BadSetting(SETTING, str(settings.backup), rule) from older
    telemetry.page.callback(
        "kelvin_ledger_kept_aside_total",
        "Usage records that the ledger could not enter, and keeps aside.",
        MetricKind.COUNTER,
        (),
        lambda: {(): float(ledger.kept_aside)},
    )
    _check_currency(settings, price_book, await database.read(currencies))
    check_runner = CheckRunner(settings.database, settings.spools)
    stack.push_async_callback(check_runner.close)
    registry = Registry(database, feed)
    access_stores = AccessStores(TenantStore(database, feed), KeyStore(database, feed))
    audit_log = AuditLog(database, clock)
    try:
        await access_stores.keys.bootstrap(settings.data, clock.wall_s())
        await access_stores.tenants.load(clock.wall_s())
        await audit_log.record_prices(price_book)
        await registry.load()
    except BadKeyFile as bad:
        raise BadSetting("KELVIN_DATA", str(settings.data), str(bad)) from bad
    except UnreadableColumn as column:
        rule = f"{column}: use the newer program that wrote it again, or restore the database as it was before"
        is_file = isinstance(settings.database, Path)
        where = ("KELVIN_DATA", settings.data) if is_file else ("KELVIN_DATABASE", settings.database)
        raise BadSetting(where[0], str(where[1]), rule) from column
    spending = SpendingFeed(database, price_book, feed, clock)
    await spending.publish_spending()
    access_stores.tenants.on_limits_changed = spending.on_budget_changed
    return ControlPlaneServices(
        settings, clock, telemetry, directory, database, journal, price_book, ledger, feed, check_runner,
        registry, access_stores, audit_log,
        spending, Tasks(),
    )  # fmt: skip


def start_backups(services: ControlPlaneServices) -> Backups:
    """Remove drafts that an earlier control plane left, and start scheduled backups if there is a place for them."""
    settings = services.settings
    remove_draft_copies(settings.data)
    backups = Backups(settings.data, services.database, services.journal)
    if settings.backup is not None and services.journal is not None:
        keeping = BackupLoop(
            backups, services.database, services.journal, settings.backup,
            every_s=settings.backup_s, keep_days=settings.backup_days, clock=services.clock,
        )  # fmt: skip
        services.telemetry.page.gauge("kelvin_backup_age_seconds", "Since the newest backup ended.", keeping.age_s)
        services.tasks.start_loop("backups", keeping.run)
    return backups


def _check_currency(settings: Settings, price_book: PriceBook, closed_currencies: Collection[str]) -> None:
    """Check that the price book has the currency of the closed months. Raises BadSetting.

    Late records of a closed month are adjustments of an open month's bill, at the closed month's prices.
    """
    if foreign_currencies := sorted(set(closed_currencies) - {price_book.currency}):
        rule = f"its currency is {price_book.currency}, and there are closed months in {', '.join(foreign_currencies)}"
        raise BadSetting("KELVIN_PRICE_BOOK", str(settings.price_book or "(the installed one)"), rule)
