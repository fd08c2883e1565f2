"""The composition root of the control plane: what there is, in the order in which it lives and dies."""

import asyncio
import logging
from collections.abc import Collection
from contextlib import AsyncExitStack, closing

from fastapi import FastAPI
from starlette.types import ASGIApp

from contracts.control import Scope
from contracts.machine import Machine
from contracts.roles import Role
from contracts.settings import BadSetting
from contracts.usage import RequestRecord
from controlplane import (
    access_api,
    admin_api,
    audit_api,
    backup_api,
    billing_api,
    grants_api,
    internal_api,
    metrics_api,
    renewal_api,
    usage_api,
)
from controlplane.access_api import Access
from controlplane.autoscaler import Autoscaler
from controlplane.backup_schedule import BackupLoop, open_backups
from controlplane.backups import Backups, sweep
from controlplane.clock import Clock, SystemClock
from controlplane.closings import currencies
from controlplane.damaged import DamageLoop
from controlplane.economy import Economy
from controlplane.examiner import Examiner
from controlplane.feed import FeedHub
from controlplane.forecasts import Forecasts
from controlplane.foresight import Foresight
from controlplane.internal_api import Internals
from controlplane.jobs import JobDesk
from controlplane.keys import KeyStore
from controlplane.ledger import Ledger
from controlplane.meters import RestoreMeters, show_pool
from controlplane.outcomes import Outcomes
from controlplane.peers import Peers
from controlplane.policy.rating import PriceBook
from controlplane.policy.roles import RULES
from controlplane.prefetch import Prefetcher
from controlplane.price_book import BadPriceBook, default_price_book, load_price_book
from controlplane.registry import Registry
from controlplane.removal import Removal
from controlplane.renewal import Renewals
from controlplane.replicas import ReplicaTable
from controlplane.scaling.adopt import Adopter
from controlplane.scaling.device import Device
from controlplane.scaling.fleet import Fleet
from controlplane.scaling.footprints import Footprints
from controlplane.scaling.local import LocalActuator
from controlplane.scaling.pool import StandbyPool
from controlplane.scaling.zygote import ZygoteClient
from controlplane.settings import LISTEN, Settings
from controlplane.spending import Spending
from controlplane.store import Database, sqlite_engine
from controlplane.tasks import Tasks
from controlplane.tenants import TenantStore
from controlplane.trail import Trail
from service.decider import hold
from service.failures import install_failure_handlers
from service.inner import open_inner
from service.openapi import add_description
from service.unix import SocketDirectory
from telemetry.telemetry import Telemetry, open_telemetry

log = logging.getLogger(__name__)

SOCKET = "control.sock"
DRAIN_S = 2
DECIDER_S = 10.0  # an activator that stands in lets go of its decision sooner


async def run(settings: Settings, stop: asyncio.Event, clock: Clock | None = None) -> None:
    """Be the control plane of `settings.data` until `stop`. Runtimes live on afterwards.

    Adoption comes before the socket: the first snapshot of the feed already names what serves. Raises BadSetting.
    """
    clock = clock or SystemClock()
    book = _book(settings)
    settings.data.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as ladder:
        telemetry = await ladder.enter_async_context(open_telemetry("controlplane", settings.telemetry))
        database = ladder.enter_context(closing(Database(sqlite_engine(settings.database))))
        directory = ladder.enter_context(closing(SocketDirectory(settings.run)))
        inner = await ladder.enter_async_context(open_inner(directory, settings.between, Role.CONTROLPLANE, LISTEN))
        ladder.enter_context(closing(await hold(directory, DECIDER_S)))  # no activator decides from now on
        journal = await open_backups(ladder, settings.data, settings.backup)
        machine = Machine(settings.device_slots, settings.cores, settings.threads_cap, settings.kv_bytes)
        ledger, feed = Ledger(database, journal), FeedHub(machine=machine)
        _check_currency(settings, book, await database.read(currencies))
        examiner = Examiner(settings.database, settings.spools)
        ladder.push_async_callback(examiner.close)
        registry = Registry(database, feed)
        access = Access(TenantStore(database, feed), KeyStore(database, feed))
        await access.keys.bootstrap(settings.data, clock.wall_s())
        await access.tenants.load(clock.wall_s())
        trail = Trail(database, clock)
        await trail.note_prices(book)
        await registry.load()
        spending = Spending(database, book, feed, clock)
        await spending.tell()
        access.tenants.on_limited = spending.changed

        zygote = ZygoteClient(directory)
        peers = Peers(directory, zygote, filters=settings.filters)
        ladder.push_async_callback(peers.close)
        device = Device(settings.cores, settings.threads_cap, settings.kv_bytes)
        table = ReplicaTable(settings.device_slots)

        tasks = Tasks()
        fleet = Fleet(directory, zygote, table, clock, tasks)
        ladder.push_async_callback(fleet.close)
        await ladder.enter_async_context(tasks)  # left before the fleet lets go of what the tasks use
        pool = StandbyPool(fleet, settings.sizing, Footprints(fleet, lambda: zygote.pid), settings.cores)
        show_pool(telemetry.page, pool)
        actuator = LocalActuator(fleet, pool, feed, device, settings.drain_s)
        forecasts = Forecasts(registry.find, peers.whereabouts, feed, clock, tasks, telemetry.page)
        economy = Economy(
            book, forecasts.history, clock, kv_bytes=settings.kv_bytes, memory_price=settings.memory_price
        )
        autoscaler = Autoscaler(registry, actuator, clock, tasks, economy)
        outcomes = Outcomes(registry, tasks)
        actuator.listen(autoscaler)
        actuator.listen(outcomes)
        actuator.listen(RestoreMeters(telemetry, table))
        actuator.listen(forecasts)
        renewals = Renewals(fleet, actuator, settings.drain_s)
        actuator.listen(renewals)
        actuator.on_start(forecasts.starting)
        actuator.on_room(autoscaler.room)
        prefetcher = Prefetcher(peers.prefetch, tasks)
        registry.on_named = prefetcher.named
        autoscaler.on_placing = actuator.on_placing = prefetcher.placing
        foresight = Foresight(
            registry, autoscaler.gaps, actuator.live,
            lambda key, total: forecasts.history.start(key, total).seconds,
            prefetcher.expected, clock, least_s=settings.foresight_s, bytes_per_s=settings.foresight_bytes,
        )  # fmt: skip

        damages = DamageLoop(peers.damaged_pids, fleet, actuator.condemn, telemetry.page)
        adopter = Adopter(directory, fleet, pool, actuator, feed, lambda key: registry.find(key) is not None)
        adopted = await adopter.sweep()
        pool.balance()
        tasks.start(pool.run(), "standbys")
        tasks.start(adopter.run(), "adopter")
        tasks.start(autoscaler.run(), "autoscaler")
        tasks.start(damages.run(), "damages")
        tasks.start(foresight.run(), "foresight")
        tasks.start(spending.run(), "spending")
        tasks.start(trail.run(), "audit")
        tasks.start(_end_with(feed, stop), "end of the feed")
        sweep(settings.data)
        backups = Backups(settings.data, database, journal)
        if settings.backup is not None and journal is not None:
            keeping = BackupLoop(
                backups, database, journal, settings.backup,
                every_s=settings.backup_s, keep_days=settings.backup_days, clock=clock,
            )  # fmt: skip
            telemetry.page.gauge("kelvin_backup_age_seconds", "Since the newest backup was whole.", keeping.age_s)
            tasks.start(keeping.run(), "backups")

        jobs = JobDesk(fleet, pool)
        internals = Internals(feed, autoscaler, ledger, registry, jobs, forecasts, economy, clock, peers.zygote_answers)
        app = compose(
            internals, access, table, outcomes, peers, ledger, book, examiner, telemetry, backups, pool, foresight,
            spending, renewals, trail,
        )  # fmt: skip
        log.info("ready", extra={"adopted": adopted, "data": str(settings.data)})
        await inner.serve(telemetry.exposing(app), directory.listen(SOCKET), RULES, stop, DRAIN_S)


def _book(settings: Settings) -> PriceBook:
    """Raises BadSetting."""
    if settings.price_book is None:
        return default_price_book()
    try:
        return load_price_book(settings.price_book)
    except BadPriceBook as bad:
        raise BadSetting("KELVIN_PRICE_BOOK", str(settings.price_book), str(bad)) from bad


def _check_currency(settings: Settings, book: PriceBook, closed: Collection[str]) -> None:
    """What comes late for a closed month is on a bill of an open one, at the prices of then. Raises BadSetting."""
    if other := sorted(set(closed) - {book.currency}):
        rule = f"its currency is {book.currency}, and there are closed months in {', '.join(other)}"
        raise BadSetting("KELVIN_PRICE_BOOK", str(settings.price_book or "(the installed one)"), rule)


async def _end_with(feed: FeedHub, stop: asyncio.Event) -> None:
    """The feed never ends by itself, and the server would wait for it."""
    await stop.wait()
    feed.end()


def compose(
    internals: Internals,
    access: Access,
    table: ReplicaTable,
    outcomes: Outcomes,
    peers: Peers,
    ledger: Ledger,
    book: PriceBook,
    examiner: Examiner,
    telemetry: Telemetry,
    backups: Backups,
    pool: StandbyPool,
    foresight: Foresight,
    spending: Spending,
    renewals: Renewals,
    trail: Trail,
) -> ASGIApp:
    """The routes as one application. Internal ones are matched first."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    install_failure_handlers(app)
    app.router.routes.extend(internal_api.routes(internals))

    def seen(records: tuple[RequestRecord, ...]) -> None:
        internals.forecasts.answered(records)
        spending.noted(records)

    app.router.routes.extend(usage_api.routes(ledger, seen))
    app.router.routes.extend(backup_api.routes(backups))
    app.router.routes.extend(access_api.internal_routes(access))
    app.include_router(metrics_api.router(telemetry, peers, table))
    registry, autoscaler, clock = internals.registry, internals.autoscaler, internals.clock
    removal = Removal(registry, access.tenants, access.keys, table, autoscaler, clock)
    explaining = (internals.forecasts, internals.economy, clock, pool, foresight)
    app.include_router(admin_api.router(registry, table, outcomes, autoscaler, peers, removal, *explaining, trail))
    app.include_router(renewal_api.router(registry, renewals, trail))
    app.include_router(grants_api.router(registry, access.tenants, clock, trail))
    app.include_router(access_api.router(access, registry, autoscaler, removal, clock, trail))
    app.include_router(audit_api.router(trail, examiner, book))
    app.include_router(
        billing_api.router(ledger, book, examiner, live_runtimes=lambda: [replica.runtime_id for replica in table])
    )
    add_description(app, "/admin/v1/openapi.json", "Kelvin: administration", Scope.BILLING_READ)
    return app
