"""Composition root of the control plane: its parts in the order in which they are opened; they close in reverse."""

import asyncio
import logging
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial

from fastapi import FastAPI
from starlette.types import ASGIApp

from controlplane.api import access_api, admin_api, audit_api, billing_api, internal_api
from controlplane.api.internal_api import InternalServices
from controlplane.api.roles_policy import RULES
from controlplane.app.cluster_backend import build_cluster_backend, build_role_label, connect_cluster
from controlplane.app.control_plane_services import ControlPlaneServices, open_services, start_backups
from controlplane.app.failover import serve_while_leading
from controlplane.app.health import Health, open_health
from controlplane.app.machine_backend import build_machine_backend
from controlplane.app.settings import LISTEN, Settings
from controlplane.backup.backups import Backups
from controlplane.billing.price_book import read_price_book
from controlplane.clock import Clock, SystemClock
from controlplane.db.availability import open_when_available, watch_write_session
from controlplane.db.nul_characters import reject_nul
from controlplane.knative.apply.cluster import ClusterApi
from controlplane.ledger.policy.rating import PriceBook
from controlplane.ledger.running_replicas import watch_lost_replicas
from controlplane.registry.feed_hub import FeedHub
from controlplane.scaling.admin_operations import AdminOperations
from controlplane.scaling.interfaces import ReplicaBackend
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.roles import Role
from kelvin.contracts.serving.control_messages import Scope
from kelvin.contracts.serving.machine import Machine
from kelvin.ipc.failure_responses import install_failure_handlers
from kelvin.ipc.internal_server import open_internal_server
from kelvin.ipc.openapi import add_description
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.standby_lock import acquire_standby_lock
from kelvin.process.hardening import make_private
from kelvin.telemetry.telemetry import describe_certificates, open_telemetry

log = logging.getLogger(__name__)

SOCKET = "control.sock"
DRAIN_S = 2
DECISION_LOCK_LIMIT_S = 10.0  # an activator's fallback scaler releases the lock sooner


async def run(settings: Settings, stop: asyncio.Event, clock: Clock | None = None) -> None:
    """Run the control plane of `settings.data` until `stop`. Runtimes live on afterwards.

    Replicas are adopted before the socket opens, so the first snapshot of the feed already has them. Raises BadSetting.
    """
    clock = clock or SystemClock()
    price_book = read_price_book(settings.price_book)
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    make_private(settings.data)
    async with open_health(settings.peer_settings, stop) as health:
        if settings.cluster is None:
            await _serve(settings, price_book, stop, clock, health, None)
            return
        async with connect_cluster(settings.cluster, clock) as cluster:
            serve = partial(_serve, settings, price_book, stop, clock, health, cluster)
            role = build_role_label(settings.cluster, cluster, clock)
            await serve_while_leading(cluster, settings.cluster.namespace, health, clock, stop, serve, role)


async def _serve(
    settings: Settings,
    price_book: PriceBook,
    stop: asyncio.Event,
    clock: Clock,
    health: Health,
    cluster: ClusterApi | None,
) -> None:
    async with AsyncExitStack() as stack:
        telemetry = await stack.enter_async_context(open_telemetry("controlplane", settings.telemetry))
        if (opened := await open_when_available(settings.database, stop, health.wait_for)) is None:
            return
        database = stack.enter_context(closing(opened))
        database.on_fenced = stop.set  # the supervisor restarts this process, which then reads the database again
        directory = stack.enter_context(closing(SocketDirectory(settings.run)))
        health.waiting_for = "its data"
        peer_settings = replace(settings.peer_settings, health=None)  # `health` has that port
        internal_server = await stack.enter_async_context(
            open_internal_server(directory, peer_settings, Role.CONTROLPLANE, LISTEN)
        )
        describe_certificates(telemetry.page, internal_server.certificate_expiry)
        # From here on no activator's fallback scaler decides.
        stack.enter_context(closing(await acquire_standby_lock(directory, DECISION_LOCK_LIMIT_S)))
        machine = None  # lets activators' fallback scalers start replicas on this machine
        if cluster is None:
            machine = Machine(settings.device_slots, settings.cores, settings.threads_cap, settings.kv_bytes)
        services = await open_services(stack, settings, clock, price_book, telemetry, directory, database, machine)
        if cluster is None or settings.cluster is None:
            backend = await build_machine_backend(stack, services)
        else:
            health.waiting_for = "the cluster"
            backend = await build_cluster_backend(
                stack, services, settings.cluster, cluster, internal_server.connector_factory, stop
            )
            if stop.is_set():
                return  # not all pods were seen, so activators must not get a snapshot
        if settings.postgres is not None:
            services.tasks.start_loop("writing session", lambda: watch_write_session(database, clock))
        services.tasks.start_loop("spending", services.spending.run)
        services.tasks.start_loop("audit", services.audit_log.run)
        since_us = clock.monotonic_us()
        services.tasks.start_loop(
            "lives without an end", lambda: watch_lost_replicas(services.ledger.record_lost_replicas, clock, since_us)
        )
        services.tasks.start(_end_feed_on(services.feed, stop), "end of the feed")
        app = telemetry.with_metrics_route(reject_nul(build_app(services, backend, start_backups(services))))
        log.info("ready", extra={"replicas": len(tuple(backend.replicas)), "data": str(settings.data)})
        with health.forward_to(app):
            await internal_server.serve(app, directory.listen(SOCKET), RULES, stop, DRAIN_S)


async def _end_feed_on(feed: FeedHub, stop: asyncio.Event) -> None:
    """End the feed on `stop`. The server waits for open responses, and the feed never ends by itself."""
    await stop.wait()
    feed.end()


def build_app(services: ControlPlaneServices, backend: ReplicaBackend, backups: Backups) -> ASGIApp:
    """Return all routes as one application. Internal routes are matched first."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    install_failure_handlers(app)
    registry, access_stores, ledger = services.registry, services.access_stores, services.ledger
    clock, audit_log = services.clock, services.audit_log
    app.router.routes.extend(
        internal_api.routes(InternalServices(services.feed, ledger.timeline_of, registry, backend, clock))
    )

    def on_requests(records: tuple[RequestRecord, ...]) -> None:
        backend.record_answers(records)
        services.spending.on_requests_recorded(records)

    app.router.routes.extend(internal_api.usage_routes(ledger, on_requests, backend.outcomes.record_exits, clock))
    app.router.routes.extend(internal_api.backup_routes(backups))
    app.router.routes.extend(access_api.internal_routes(access_stores))
    changes = AdminOperations(
        registry, access_stores.tenants, access_stores.keys, backend.replicas, backend.scaler, clock
    )
    app.include_router(admin_api.router(registry, backend, changes, clock))
    for router in backend.routers:
        app.include_router(router)
    app.include_router(access_api.grants_router(registry, access_stores.tenants, clock, audit_log))
    app.include_router(access_api.router(access_stores, changes, clock, audit_log))
    app.include_router(audit_api.router(audit_log, services.check_runner, services.price_book))
    app.include_router(
        billing_api.router(ledger, services.price_book, services.check_runner, live_runtimes=backend.find_live_replicas)
    )
    add_description(app, "/admin/v1/openapi.json", "Kelvin: administration", Scope.BILLING_READ)
    return app
