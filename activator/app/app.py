"""The activator's composition root: which parts exist, which know each other, and in which order they start and end."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from activator.accounting.in_flight_requests import InFlightRequests
from activator.accounting.metrics import RequestMetrics
from activator.accounting.timelines import Timelines
from activator.accounting.usage_records import CompletionLog, UsageRecords, ledger_poster
from activator.answers.answer_store import LocalAnswerStore
from activator.answers.answers_handover import HandoverReceiver, HandoverSender
from activator.answers.idempotency import Idempotency
from activator.answers.idempotency_secret import SECRET_FILE, BadIdempotencySecret, ensure_idempotency_secret
from activator.answers.redis_answer_store import RedisAnswerStore
from activator.answers.response_cache import ResponseCache
from activator.api.completions import Completions
from activator.api.front_door import FrontDoorApp
from activator.api.knative_data_path import KnativeDataPath
from activator.api.lookup_routes import LookupRoutes
from activator.api.open_inference_metadata import OpenInferenceMetadata
from activator.api.passthrough import Passthrough
from activator.app.health import build_health_app, read_readiness, register_gauges
from activator.app.settings import ActivatorSettings
from activator.auth.authenticator import Authenticator
from activator.auth.firewall import Firewall
from activator.auth.key_uses import KeyUses
from activator.auth.oidc import open_token_verifier
from activator.degradation.degradation import Degradation
from activator.http.exchange import new_request_id
from activator.http.listener_state import ListenerState
from activator.http.server import listen_for, listen_plain, serve_plain, serve_tls
from activator.limits.concurrency_limits import SharedCapacity
from activator.limits.limit_counters import open_limit_counters
from activator.limits.tenant_budgets import TenantBudgets
from activator.queue.slot_allocator import ActivatorPeers
from activator.queue.throttler import Throttler
from activator.queue.waker import Waker
from activator.request.attempts import Attempts
from activator.request.hedged_request import Hedges
from activator.request.inference_request import UpstreamRequestFactory
from activator.request.retry_policy import LIMITS as RETRY_LIMITS
from activator.request.retry_policy import RetryBudgets
from activator.request.tenant_limits import TenantLimiter
from activator.routing.feed_client import FeedClient, with_pod_addresses, with_remote_addresses
from activator.routing.last_feed import LastFeed
from activator.routing.policy.version_key import VersionKey
from activator.routing.routing_table import RoutingTable
from activator.scale_link.backlogs import Backlogs
from activator.scale_link.fallback_scaler import FallbackScaler
from activator.scale_link.load_reporter import LoadReporter
from activator.scale_link.report_sinks import choose_report_sink
from activator.tls.certificate_authority import BadCertificateAuthority, CertificateAuthority
from activator.tls.certificate_files import BadCertificate, CertificateFiles
from activator.tls.heap_trimmer import HeapTrimmer
from activator.tls.server_certificates import ServerCertificates
from activator.upstream.background_tasks import BackgroundTasks
from activator.upstream.readiness_prober import ReadinessProber
from activator.upstream.replica_requests import ReplicaSessions
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.roles import Role
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.setting_parser import BadSetting
from kelvin.ipc.connector import is_remote
from kelvin.ipc.internal_server import open_internal_server
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.hardening import make_private
from kelvin.process.loops import PROCESS_HEALTH, Body, Loops
from kelvin.process.race import first_completed
from kelvin.process.service_lifecycle import Stop
from kelvin.spool import Post, Shipper, Spool, recover
from kelvin.telemetry.telemetry import describe_certificates, open_telemetry

log = logging.getLogger(__name__)

FLUSH_S: Final = 5.0
RECOVER_AGAIN_S: Final = 10.0
SPOOL_PREFIX: Final = "activator-"
FIRST_FEED_S: Final = 5.0
SOCKET: Final = "activator.sock"
READY_POLL_S: Final = 0.02  # between readiness checks of a new activator


async def run(settings: ActivatorSettings, stop: Stop) -> None:
    """Serve until `stop`; then drain, flush the spool, and return."""
    name = SPOOL_PREFIX + new_request_id().removeprefix("req_")  # unique to this process; also the spool's source
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    make_private(settings.data)
    authority = _authority(settings)
    files = _certificate_files(settings)
    certificates = ServerCertificates(authority, settings.domain, files, settings.host)
    async with AsyncExitStack() as stack:
        telemetry = await stack.enter_async_context(open_telemetry("activator", settings.telemetry))
        directory = SocketDirectory(settings.socket_directory)
        stack.callback(directory.close)
        on_cluster = settings.autoscaler is not None  # replicas are pods that Knative scales
        internal_server = open_internal_server(directory, settings.peer_settings, Role.ACTIVATOR, pods=on_cluster)
        peer_server = await stack.enter_async_context(internal_server)
        describe_certificates(telemetry.page, lambda: {**certificates.expiries(), **peer_server.certificate_expiry()})
        connector_factory = peer_server.connector_factory
        is_apart = is_remote(settings.peer_settings.control)  # on another host than the control plane and its replicas
        to_control = connector_factory.connector_to(settings.peer_settings.control, Role.CONTROLPLANE)
        control = ServiceClient.from_connector(to_control, "the control plane")
        stack.push_async_callback(control.close)
        # Calls of the push and admin APIs last as long as their callers like. See `Passthrough` for their bound.
        to_snapshotter = connector_factory.connector_to(settings.peer_settings.snapshotter, Role.SNAPSHOTTER)
        snapshotter = ServiceClient.from_connector(to_snapshotter, "the snapshotter", limit=0)
        stack.push_async_callback(snapshotter.close)
        # A separate client, so that callers never hold up the feed.
        unlimited_control = ServiceClient.from_connector(to_control, "the control plane", limit=0)
        stack.push_async_callback(unlimited_control.close)
        spool = Spool.open(settings.spool_directory, name)
        stack.push_async_callback(asyncio.to_thread, spool.close)
        post = ledger_poster(control)
        shipper = await stack.enter_async_context(Shipper(spool, post))
        stack.push_async_callback(_flush, shipper)
        limit_counters = await stack.enter_async_context(open_limit_counters(settings.redis, name, telemetry.page))
        background_tasks = BackgroundTasks()
        replica_sessions = ReplicaSessions(connector_factory, background_tasks)
        stack.push_async_callback(replica_sessions.close)
        stack.push_async_callback(background_tasks.close)

        table, timelines, in_flight = RoutingTable(), Timelines(), InFlightRequests()
        load_reporting = choose_report_sink(
            settings.autoscaler, control, name, table.revisions.of, lambda: table.revisions.pools,
            limit_counters.activator_count, telemetry.page,
        )  # fmt: skip
        backlogs = Backlogs(table.backlog_s, lambda key: throttler.queued(key), lambda key: throttler.throughput(key))
        reporter = LoadReporter(load_reporting.sink, backlogs)

        def on_own_start(line: Feed) -> None:
            line = msgspec.structs.replace(line, revision=table.revision)
            apply(line)
            last_feed.record_own_line(line)

        fallback_scaler = FallbackScaler(
            reporter.send_wake, directory,
            is_heard=lambda: feed.connected,
            machine=lambda: table.machine if last_feed.is_fresh() and not (is_apart or on_cluster) else None,
            publish_line=on_own_start, asked_us=lambda key: waker.wake_sent_us(key), page=telemetry.page,
        )  # fmt: skip
        stack.push_async_callback(fallback_scaler.close)
        waker = Waker(fallback_scaler.send_wake)
        stack.push_async_callback(waker.close)
        peers = ActivatorPeers(name, limit_counters.activator_names, settings.subsets)
        throttler = Throttler(settings.queue, waker, longest_rest_s=settings.breaker_s, peers=peers)
        metrics = RequestMetrics(telemetry.page)
        usage = UsageRecords(spool, timelines, on_end=CompletionLog(metrics, telemetry))
        budgets = TenantBudgets(name, limit_counters.budgets)
        tenants = asyncio.Event()

        readiness_prober = ReadinessProber(
            connector_factory, lambda row: apply_line(Feed(revision=table.revision, replicas=(row,))), telemetry.page
        )
        stack.push_async_callback(readiness_prober.close)

        def apply(line: Feed) -> None:
            apply_line(readiness_prober.take(line))

        def apply_line(line: Feed) -> None:
            throttler.apply(line)  # waiting requests go first
            table.apply(line)
            budgets.apply(line)
            if line.full or line.removed_replicas:
                replica_sessions.retain(throttler.addresses())
            if line.tenants:
                tenants.set()

        last_feed = LastFeed(directory, table, settings.max_feed_age_s)

        def on_feed_line(line: Feed) -> None:
            line = with_remote_addresses(line) if is_apart else with_pod_addresses(line) if on_cluster else line
            apply(line)
            last_feed.record_heard_line(line)

        feed = FeedClient(control, on_feed_line, name)
        limits, key_uses = settings.request, KeyUses(control)
        token_verifier = await stack.enter_async_context(open_token_verifier(settings.issuers, telemetry.page))
        authenticator = Authenticator(table, key_uses, token_verifier, is_fresh=last_feed.is_fresh)
        request_factory, retries = (
            UpstreamRequestFactory(replica_sessions, usage.source),
            RetryBudgets[tuple[str, VersionKey]](RETRY_LIMITS),
        )
        hedges = Hedges(throttler, request_factory, retries, metrics) if settings.hedges else None
        attempts = Attempts(throttler, request_factory, retries, metrics, hedges)
        answers, store = LocalAnswerStore(settings.idempotency), limit_counters.store
        idempotency_answers = (
            answers if store is None else RedisAnswerStore(store, "once", settings.idempotency, answers)
        )
        cache_answers = (
            LocalAnswerStore(settings.cache) if store is None else RedisAnswerStore(store, "cache", settings.cache)
        )
        secret = _idempotency_secret(settings)
        cache = ResponseCache(secret, cache_answers, settings.cache, background_tasks, telemetry.page)
        idempotency = Idempotency(secret, idempotency_answers, settings.idempotency, telemetry.page)
        handover = HandoverSender(answers, idempotency.list_running_keys)
        stack.push_async_callback(handover.close)
        # Activators with a shared store know the same keys already.
        receiver = await HandoverReceiver.connect(answers, directory) if store is None else None
        stack.push_async_callback(idempotency.close)
        tenant_limiter = TenantLimiter(limit_counters.concurrency_limiter, limit_counters.rates, budgets)
        firewall_settings = settings.firewall
        firewall = (
            None
            if firewall_settings is None
            else await stack.enter_async_context(
                Firewall(firewall_settings.socket, firewall_settings.timeout_s, firewall_settings.unanswered, metrics)
            )
        )
        unread = SharedCapacity(limits.requests, "the room for unread request bodies", "requests")
        front_door = FrontDoorApp(
            Completions(
                authenticator,
                table,
                throttler,
                reporter,
                attempts,
                usage,
                limits,
                tenant_limiter,
                in_flight,
                idempotency,
                cache,
                Degradation(table, throttler, reporter, cache.old_responses),
                unread,
            ),
            LookupRoutes(authenticator, table, timelines, unlimited_control, in_flight, unread),
            Passthrough(authenticator, {"admin": unlimited_control, "push": snapshotter}, limits),
            OpenInferenceMetadata(authenticator, table, unread),
            settings.domain,
            limits,
            metrics,
            firewall,
        )
        register_gauges(telemetry.page, front_door, throttler, shipper, feed, last_feed, answers)
        listener = listen_for(settings.host, settings.port, settings.listener_fd)
        stack.callback(listener.close)
        plain_listener = None if settings.data_path is None else listen_plain(*settings.data_path)
        if plain_listener is not None:
            stack.callback(plain_listener.close)
        own_socket = directory.listen_unpublished(SOCKET)
        stack.callback(directory.discard_unpublished, SOCKET)
        stack.callback(own_socket.close)
        log.info("listening", extra={"host": settings.host, "port": listener.getsockname()[1], "source": name})

        listener_state = ListenerState(certificates.listener, settings.connections, metrics)

        def on_replaced() -> None:
            listener_state.is_replaced = True
            stop.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, on_replaced)

        def is_ready(is_autoscaler_heard: Callable[[], bool] = load_reporting.is_heard) -> bool:
            has_feed = feed.synced.is_set() and last_feed.is_fresh()
            return has_feed and is_autoscaler_heard() and not stop.is_set() and not PROCESS_HEALTH.failing()

        # The autoscaler fails for all activators at once, and there is no way around them: being connected once is
        # enough.
        is_open = partial(is_ready, load_reporting.was_heard)
        health_app = build_health_app(
            is_ready,
            is_open,
            lambda: read_readiness(feed, last_feed, load_reporting.is_heard() if on_cluster else None),
        )
        servers = [serve_tls(front_door, listener_state, listener, stop, settings.drain_s)]
        if plain_listener is not None:
            data_path = KnativeDataPath(front_door, table.revisions, is_ready)
            servers.append(serve_plain(data_path, listener_state, plain_listener, stop, settings.drain_s))
        background: dict[str, Body] = {
            "publish": lambda: _publish(directory, is_ready),
            "feed": feed.run,
            "kept feed": lambda: feed.start_from_last_feed(last_feed.try_load, apply),
            "feed file": last_feed.run,
            "reporter": reporter.run,
            "key uses": key_uses.run,
            "kept answers": idempotency.run,
            **({} if receiver is None else {"inherited answers": receiver.receive}),
            **({} if store else {"handover": lambda: _hand_over(handover, answers, directory, stop)}),
            "response cache": cache.run,
            "leftover spools": lambda: ship_leftovers(settings.spool_directory, post),
            **limit_counters.loops,
            **load_reporting.loops,
            "certificates": lambda: certificates.run(table.tenants, tenants),
            "heap": HeapTrimmer().run,
            **({} if token_verifier is None else {"issuers": token_verifier.run}),
            **({} if files is None else {"certificate files": files.run}),
        }
        await _while_serving(
            background,
            _serve(settings, servers, feed, stop),
            lambda ended: peer_server.serve(telemetry.with_metrics_route(health_app), own_socket, {}, ended, 1),
        )


async def _publish(directory: SocketDirectory, is_ready: Callable[[], bool]) -> None:
    """Take over the name of the activator's own socket. If an old activator still serves there, wait until ready. If
    this process never becomes ready, the old one stays reachable.
    """
    if directory.is_served(SOCKET):
        while not is_ready():  # noqa: ASYNC110 (it depends on several things, and no event stands for all of them)
            await asyncio.sleep(READY_POLL_S)
    directory.publish(SOCKET)


async def _hand_over(
    handover: HandoverSender, answers: LocalAnswerStore, directory: SocketDirectory, stop: Stop
) -> None:
    """Let the next activator connect once this one decides on idempotency keys. Hand over to it at `stop`."""
    await answers.has_authority.wait()
    await handover.listen(directory)
    await stop.wait()
    handover.hand_over()


async def _serve(
    settings: ActivatorSettings, servers: list[Coroutine[object, object, None]], feed: FeedClient, stop: Stop
) -> None:
    """Run the listeners until `stop`. With an inherited socket, first wait up to FIRST_FEED_S for the feed. Clients can
    wait on that socket until this activator knows the API keys.
    """
    if settings.listener_fd is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_FEED_S):
                await first_completed(feed.synced.wait(), stop.wait())
    async with asyncio.TaskGroup() as tasks:
        for server in servers:
            tasks.create_task(server)


def _certificate_files(settings: ActivatorSettings) -> CertificateFiles | None:
    if settings.certificates is None:
        return None
    try:
        return CertificateFiles(settings.certificates)
    except BadCertificate as bad:
        raise BadSetting("KELVIN_CERTIFICATES", str(settings.certificates), str(bad)) from bad


def _authority(settings: ActivatorSettings) -> CertificateAuthority:
    try:
        return CertificateAuthority.load_or_make(settings.data / "ca.pem", settings.data / "tls" / "ca.key")
    except BadCertificateAuthority as bad:
        raise BadSetting("KELVIN_DATA", str(settings.data), str(bad)) from bad


def _idempotency_secret(settings: ActivatorSettings) -> bytes:
    try:
        return ensure_idempotency_secret(settings.data / SECRET_FILE)
    except BadIdempotencySecret as bad:
        raise BadSetting("KELVIN_DATA", str(settings.data), str(bad)) from bad


async def _while_serving(
    background: Mapping[str, Body],
    public_server: Coroutine[object, object, None],
    serve_health: Callable[[asyncio.Event], Coroutine[object, object, None]],
) -> None:
    """Serve until `public_server` has drained. The background loops and the health endpoint run until then."""
    ended = asyncio.Event()
    async with Loops() as loops, asyncio.TaskGroup() as tasks:
        for name, body in background.items():
            loops.start(name, body)
        tasks.create_task(serve_health(ended))
        await public_server
        ended.set()
        await loops.close()


async def _flush(shipper: Shipper) -> None:
    if not await shipper.flush(Deadline.after(FLUSH_S, time.monotonic())):
        log.warning("records stay in the spool; the next activator ships them", extra={"shipper": repr(shipper)})


async def ship_leftovers(spools: Path, post: Post) -> None:
    """Ship the spools that other activators left, until cancelled. An activator that ends while this one serves, as at
    a restart, may leave records that it could not ship in time.
    """
    while True:
        for recovered in await recover(spools, lambda source: post if source.startswith(SPOOL_PREFIX) else None):
            log.info("shipped a leftover spool", extra={"recovered": repr(recovered)})
        await asyncio.sleep(RECOVER_AGAIN_S)
