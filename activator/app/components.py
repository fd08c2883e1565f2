"""Build the activator's parts, each from those before it. `app.py` runs them.

Begin with `build_components`, the last function. Leaving the exit stack closes the parts in reverse order.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import msgspec

from activator.accounting.in_flight_requests import InFlightRequests
from activator.accounting.metrics import RequestMetrics
from activator.accounting.timelines import Timelines
from activator.accounting.usage_records import CompletionLog, UsageRecords, ledger_poster
from activator.answers.answer_store import AnswerStore, LocalAnswerStore
from activator.answers.answers_handover import HandoverReceiver, HandoverSender
from activator.answers.idempotency import Idempotency
from activator.answers.idempotency_secret import SECRET_FILE, BadIdempotencySecret, ensure_idempotency_secret
from activator.answers.redis_answer_store import RedisAnswerStore
from activator.answers.response_cache import ResponseCache
from activator.api.completions import Completions
from activator.api.front_door import FrontDoorApp
from activator.api.inference_handler import InferenceHandler
from activator.api.inference_runner import InferenceRunner
from activator.api.lookup_routes import LookupRoutes
from activator.api.open_inference_metadata import OpenInferenceMetadata
from activator.api.passthrough import Passthrough
from activator.api.version_resolver import VersionResolver
from activator.app.feed_applier import FeedApplier
from activator.app.settings import ActivatorSettings
from activator.auth.authenticator import Authenticator
from activator.auth.firewall import Firewall
from activator.auth.key_uses import KeyUses
from activator.auth.oidc import TokenVerifier, open_token_verifier
from activator.degradation.degradation import Degradation
from activator.limits.concurrency_limits import SharedCapacity
from activator.limits.limit_counters import LimitCounters, open_limit_counters
from activator.limits.tenant_budgets import TenantBudgets
from activator.queue.slot_allocator import ActivatorPeers
from activator.queue.throttler import Throttler
from activator.queue.waker import WakeCall, Waker
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
from activator.scale_link.report_sinks import LoadReporting, choose_report_sink
from activator.upstream.background_tasks import BackgroundTasks
from activator.upstream.readiness_prober import ReadinessProber
from activator.upstream.replica_sessions import ReplicaSessions
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.roles import Role
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.serving.machine import Machine
from kelvin.contracts.setting_parser import BadSetting
from kelvin.ipc.internal_server import InternalServer, open_internal_server
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.spool import Post, Shipper, Spool
from kelvin.telemetry.telemetry import Telemetry

log = logging.getLogger(__name__)

FLUSH_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Inputs of every builder. `name` is unique to this process. `stack` closes the parts that the builders open."""

    settings: ActivatorSettings
    name: str
    telemetry: Telemetry
    stack: AsyncExitStack


@dataclass(frozen=True, slots=True)
class Peers:
    """The other services of the installation, and the server for their calls."""

    directory: SocketDirectory
    server: InternalServer
    control: ServiceClient
    unlimited_control: ServiceClient  # a separate client, so that callers never hold up the feed
    snapshotter: ServiceClient


async def open_peers(context: BuildContext) -> Peers:
    """Open the clients of the other services, and the sockets for their calls."""
    settings, stack = context.settings, context.stack
    directory = SocketDirectory(settings.socket_directory)
    stack.callback(directory.close)
    server = await stack.enter_async_context(
        open_internal_server(directory, settings.peer_settings, Role.ACTIVATOR, pods=settings.is_on_cluster)
    )
    to_control = server.connector_factory.connector_to(settings.peer_settings.control, Role.CONTROLPLANE)
    control = ServiceClient.from_connector(to_control, "the control plane")
    stack.push_async_callback(control.close)
    # Calls of the push and admin APIs last as long as their callers like. See `Passthrough` for their bound.
    to_snapshotter = server.connector_factory.connector_to(settings.peer_settings.snapshotter, Role.SNAPSHOTTER)
    snapshotter = ServiceClient.from_connector(to_snapshotter, "the snapshotter", limit=0)
    stack.push_async_callback(snapshotter.close)
    unlimited_control = ServiceClient.from_connector(to_control, "the control plane", limit=0)
    stack.push_async_callback(unlimited_control.close)
    return Peers(directory, server, control, unlimited_control, snapshotter)


@dataclass(frozen=True, slots=True)
class Accounting:
    """Settling of requests, and shipping of their usage records."""

    shipper: Shipper
    post: Post
    timelines: Timelines
    metrics: RequestMetrics
    usage: UsageRecords


async def open_accounting(context: BuildContext, peers: Peers) -> Accounting:
    """Open this process's spool, and start shipping it to the ledger."""
    spool = Spool.open(context.settings.spool_directory, context.name)
    context.stack.push_async_callback(asyncio.to_thread, spool.close)
    post = ledger_poster(peers.control)
    shipper = await context.stack.enter_async_context(Shipper(spool, post))
    context.stack.push_async_callback(flush_spool, shipper)
    timelines, metrics = Timelines(), RequestMetrics(context.telemetry.page)
    usage = UsageRecords(spool, timelines, on_end=CompletionLog(metrics, context.telemetry))
    return Accounting(shipper, post, timelines, metrics, usage)


async def flush_spool(shipper: Shipper) -> None:
    """Ship the remaining records, for at most FLUSH_S."""
    if not await shipper.flush(Deadline.after(FLUSH_S, time.monotonic())):
        log.warning("records stay in the spool; the next activator ships them", extra={"shipper": repr(shipper)})


@dataclass(frozen=True, slots=True)
class LimitComponents:
    """The limits of tenants, and of unread request bodies."""

    counters: LimitCounters
    budgets: TenantBudgets
    tenant_limiter: TenantLimiter
    unread_bodies: SharedCapacity


async def build_limits(context: BuildContext) -> LimitComponents:
    """Build the limits, which activators share if a Redis is set."""
    settings = context.settings
    counters = await context.stack.enter_async_context(
        open_limit_counters(settings.redis, context.name, context.telemetry.page)
    )
    budgets = TenantBudgets(context.name, counters.budgets)
    tenant_limiter = TenantLimiter(counters.concurrency_limiter, counters.rates, budgets)
    unread_bodies = SharedCapacity(settings.request.requests, "the room for unread request bodies", "requests")
    return LimitComponents(counters, budgets, tenant_limiter, unread_bodies)


class LateWakeCall:
    """A wake call that is connected later: the throttler needs it, and its target needs the throttler."""

    def __init__(self) -> None:
        self.target: WakeCall | None = None

    async def __call__(self, key: VersionKey) -> bool:
        """Call the target, which is set before the first request."""
        assert self.target is not None
        return await self.target(key)


@dataclass(frozen=True, slots=True)
class QueueComponents:
    """The queue with its replicas, the feed that it follows, and the reports that scale it."""

    background_tasks: BackgroundTasks
    replica_sessions: ReplicaSessions
    table: RoutingTable
    throttler: Throttler
    load_reporting: LoadReporting
    reporter: LoadReporter
    feed: FeedClient
    last_feed: LastFeed
    feed_applier: FeedApplier
    apply_line: Callable[[Feed], None]  # for lines that are not from the control plane


def build_queue(context: BuildContext, peers: Peers, limits: LimitComponents) -> QueueComponents:
    """Build the queue, the feed that it follows, and the load reports that scale it."""
    settings, stack, page = context.settings, context.stack, context.telemetry.page
    background_tasks = BackgroundTasks()
    replica_sessions = ReplicaSessions(peers.server.connector_factory, background_tasks)
    stack.push_async_callback(replica_sessions.close)
    stack.push_async_callback(background_tasks.close)
    table, wake_call = RoutingTable(), LateWakeCall()
    waker = Waker(wake_call)
    activators = ActivatorPeers(context.name, limits.counters.activator_names, settings.subsets)
    throttler = Throttler(settings.queue, waker, longest_open_s=settings.breaker_s, peers=activators)
    load_reporting = choose_report_sink(
        settings.autoscaler, peers.control, context.name, table.revisions.find_revision, lambda: table.revisions.pools,
        limits.counters.activator_count, page,
    )  # fmt: skip
    reporter = LoadReporter(
        load_reporting.sink, Backlogs(table.backlog_s, throttler.queue_length, throttler.throughput)
    )
    feed_applier = FeedApplier(throttler, table, limits.budgets, replica_sessions)
    readiness_prober = ReadinessProber(peers.server.connector_factory, feed_applier.apply_replica, page)
    last_feed = LastFeed(peers.directory, table, settings.max_feed_age_s)

    def apply_line(line: Feed) -> None:
        feed_applier.apply(readiness_prober.filter_feed(line))

    def apply_control_line(line: Feed) -> None:
        if settings.is_remote:
            line = with_remote_addresses(line)
        elif settings.is_on_cluster:
            line = with_pod_addresses(line)
        apply_line(line)
        last_feed.record_received(line)

    def apply_own_start(line: Feed) -> None:
        line = msgspec.structs.replace(line, revision=table.revision)
        apply_line(line)
        last_feed.record_local_change(line)

    def machine() -> Machine | None:
        is_alone = not (settings.is_remote or settings.is_on_cluster)
        return table.machine if last_feed.is_fresh() and is_alone else None

    feed = FeedClient(peers.control, apply_control_line, context.name)
    fallback_scaler = FallbackScaler(
        reporter.send_wake, peers.directory, is_feed_connected=lambda: feed.connected, machine=machine,
        publish_line=apply_own_start, wake_sent_us=waker.wake_sent_us, page=page,
    )  # fmt: skip
    wake_call.target = fallback_scaler.send_wake
    stack.push_async_callback(fallback_scaler.close)
    stack.push_async_callback(waker.close)
    stack.push_async_callback(readiness_prober.close)
    return QueueComponents(
        background_tasks, replica_sessions, table, throttler, load_reporting, reporter, feed, last_feed, feed_applier,
        apply_line,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AuthComponents:
    """Authentication of callers, and reports of the use of their keys."""

    authenticator: Authenticator
    key_uses: KeyUses
    token_verifier: TokenVerifier | None


async def build_auth(context: BuildContext, peers: Peers, queue: QueueComponents) -> AuthComponents:
    """Build the authenticator. It verifies signed tokens if issuers are trusted."""
    token_verifier = await context.stack.enter_async_context(
        open_token_verifier(context.settings.issuers, context.telemetry.page)
    )
    key_uses = KeyUses(peers.control)
    authenticator = Authenticator(queue.table, key_uses, token_verifier, is_fresh=queue.last_feed.is_fresh)
    return AuthComponents(authenticator, key_uses, token_verifier)


@dataclass(frozen=True, slots=True)
class AnswerComponents:
    """Kept answers, and their handover between two activators."""

    local_store: LocalAnswerStore
    idempotency: Idempotency
    cache: ResponseCache
    handover: HandoverSender
    receiver: HandoverReceiver | None  # None if no activator hands over to this one


async def build_answers(
    context: BuildContext, peers: Peers, limits: LimitComponents, queue: QueueComponents
) -> AnswerComponents:
    """Build the answer stores, in Redis if one is set. Connect to an old activator that hands over its answers."""
    settings, store, page = context.settings, limits.counters.store, context.telemetry.page
    local_store = LocalAnswerStore(settings.idempotency)
    idempotency_store: AnswerStore = local_store
    cache_store: AnswerStore = LocalAnswerStore(settings.cache)
    if store is not None:
        idempotency_store = RedisAnswerStore(store, "once", settings.idempotency, local_store)
        cache_store = RedisAnswerStore(store, "cache", settings.cache)
    secret = _idempotency_secret(settings)
    cache = ResponseCache(secret, cache_store, settings.cache, queue.background_tasks, page)
    idempotency = Idempotency(secret, idempotency_store, settings.idempotency, page)
    handover = HandoverSender(local_store, idempotency.list_running_keys)
    context.stack.push_async_callback(handover.close)
    # Activators with a shared store know the same keys already.
    receiver = await HandoverReceiver.connect(local_store, peers.directory) if store is None else None
    context.stack.push_async_callback(idempotency.close)
    return AnswerComponents(local_store, idempotency, cache, handover, receiver)


def _idempotency_secret(settings: ActivatorSettings) -> bytes:
    try:
        return ensure_idempotency_secret(settings.data / SECRET_FILE)
    except BadIdempotencySecret as bad:
        raise BadSetting("KELVIN_DATA", str(settings.data), str(bad)) from bad


async def build_api(
    context: BuildContext,
    peers: Peers,
    accounting: Accounting,
    limits: LimitComponents,
    queue: QueueComponents,
    auth: AuthComponents,
    answers: AnswerComponents,
) -> FrontDoorApp:
    """Build the ASGI application that receives every public request."""
    settings, metrics, in_flight = context.settings, accounting.metrics, InFlightRequests()
    request_factory = UpstreamRequestFactory(queue.replica_sessions, accounting.usage.source)
    retries = RetryBudgets[tuple[str, VersionKey]](RETRY_LIMITS)
    hedges = Hedges(queue.throttler, request_factory, retries, metrics) if settings.hedges else None
    handler = InferenceHandler(
        VersionResolver(queue.table, queue.throttler, accounting.usage),
        answers.cache,
        Degradation(queue.table, queue.throttler, queue.reporter, answers.cache.old_responses),
        Attempts(queue.throttler, request_factory, retries, metrics, hedges),
        queue.throttler,
        queue.reporter,
        limits.tenant_limiter,
    )
    runner = InferenceRunner(
        handler, queue.throttler, accounting.usage, limits.tenant_limiter, in_flight, settings.request.hold_s
    )
    completions = Completions(
        auth.authenticator, queue.table, limits.tenant_limiter, settings.request, limits.unread_bodies,
        answers.idempotency, runner,
    )  # fmt: skip
    firewall = None
    if (waf := settings.firewall) is not None:
        firewall = await context.stack.enter_async_context(Firewall(waf.socket, waf.timeout_s, waf.unanswered, metrics))
    return FrontDoorApp(
        completions,
        LookupRoutes(
            auth.authenticator, queue.table, accounting.timelines, peers.unlimited_control, in_flight,
            limits.unread_bodies,
        ),
        Passthrough(
            auth.authenticator, {"admin": peers.unlimited_control, "push": peers.snapshotter}, settings.request
        ),
        OpenInferenceMetadata(auth.authenticator, queue.table, limits.unread_bodies),
        settings.domain,
        settings.request,
        metrics,
        firewall,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Components:
    """All parts of the activator."""

    peers: Peers
    accounting: Accounting
    limits: LimitComponents
    queue: QueueComponents
    auth: AuthComponents
    answers: AnswerComponents
    front_door: FrontDoorApp


async def build_components(context: BuildContext) -> Components:
    """Build all parts. Raises BadSetting, OSError."""
    peers = await open_peers(context)
    accounting = await open_accounting(context, peers)
    limits = await build_limits(context)
    queue = build_queue(context, peers, limits)
    auth = await build_auth(context, peers, queue)
    answers = await build_answers(context, peers, limits, queue)
    front_door = await build_api(context, peers, accounting, limits, queue, auth, answers)
    return Components(peers, accounting, limits, queue, auth, answers, front_door)
