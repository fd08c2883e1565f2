"""The activator's composition root: what exists, who knows whom, in which order it starts and ends."""

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

from activator.allowances import Allowances
from activator.answers_handover import HandoverReceiver, HandoverSender
from activator.attempts import Attempts
from activator.authenticate import Authenticator
from activator.authority import Authority, BadAuthority
from activator.backlogs import Backlogs
from activator.budgets import Budgets
from activator.cache import ResponseCache
from activator.call import Sender
from activator.certificate_files import BadCertificate, CertificateFiles
from activator.certificates import Certificates
from activator.completions import Completions
from activator.counting import open_rates
from activator.door import Door
from activator.errands import Errands
from activator.exchange import new_request_id
from activator.feed import FeedClient, from_afar, with_pods
from activator.firewall import Firewall
from activator.gate import Gate
from activator.health import describe, health, readiness
from activator.heap import HeapTrimmer
from activator.hedges import Hedges
from activator.in_place import InPlace
from activator.kept_answers import OwnAnswers
from activator.key_uses import KeyUses
from activator.keys import VersionKey
from activator.ladder import Ladders
from activator.last_feed import LastFeed
from activator.lists import Lists
from activator.meters import Meters
from activator.oidc import open_tokens
from activator.once import Once
from activator.once_key import NAME as ONCE_KEY
from activator.once_key import BadOnceKey, ensure_once_key
from activator.open_inference import OpenInference
from activator.passthrough import Passthrough
from activator.policy.retries import LIMITS as RETRY_LIMITS
from activator.policy.retries import Budgets as RetryBudgets
from activator.proving import Proving
from activator.proxy import Upstreams
from activator.reporter import Reporter
from activator.server import listen_for, listen_plain, serve_plain, serve_tls
from activator.settings import ActivatorSettings
from activator.shared_answers import SharedAnswers
from activator.shares import Room
from activator.sinks import choose_sink
from activator.slots import Peers
from activator.stand_in import StandIn
from activator.table import Table
from activator.throttler import Throttler
from activator.timelines import Timelines
from activator.under_way import UnderWay
from activator.usage import Endings, Usage, poster
from activator.wake import Waker
from contracts.control import Feed
from contracts.deadline import Deadline
from contracts.roles import Role
from contracts.settings import BadSetting
from service.client import ServiceClient
from service.first import first
from service.inner import open_inner
from service.loops import PROCESS, Body, Loops
from service.private import make_private
from service.run import Stop
from service.unix import SocketDirectory
from service.way import is_remote
from spool import Post, Shipper, Spool, recover
from telemetry.telemetry import describe_certificates, open_telemetry

log = logging.getLogger(__name__)

FLUSH_S: Final = 5.0
RECOVER_AGAIN_S: Final = 10.0
PREFIX: Final = "activator-"
FIRST_FEED_S: Final = 5.0
SOCKET: Final = "activator.sock"
LOOK_S: Final = 0.02  # between readiness checks of a new activator


async def run(settings: ActivatorSettings, stop: Stop) -> None:
    """Serve until `stop`; then drain, flush the spool, and return."""
    name = PREFIX + new_request_id().removeprefix("req_")  # one process lifetime, and the spool's source
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    make_private(settings.data)
    authority = _authority(settings)
    files = _certificate_files(settings)
    certificates = Certificates(authority, settings.domain, files, settings.host)
    async with AsyncExitStack() as ladder:
        telemetry = await ladder.enter_async_context(open_telemetry("activator", settings.telemetry))
        directory = SocketDirectory(settings.run)
        ladder.callback(directory.close)
        on_cluster = settings.autoscaler is not None  # replicas are pods, and Knative scales them
        inward = open_inner(directory, settings.between, Role.ACTIVATOR, pods=on_cluster)
        among = await ladder.enter_async_context(inward)
        describe_certificates(telemetry.page, lambda: {**certificates.ends(), **among.ends()})
        ways = among.ways
        is_apart = is_remote(settings.between.control)  # from the control plane, and from what it decides on
        to_control = ways.to(settings.between.control, Role.CONTROLPLANE)
        control = ServiceClient.by(to_control, "the control plane")
        ladder.push_async_callback(control.close)
        # Calls of the push and admin APIs last as long as their callers like. See `Passthrough` for their bound.
        to_snapshotter = ways.to(settings.between.snapshotter, Role.SNAPSHOTTER)
        snapshotter = ServiceClient.by(to_snapshotter, "the snapshotter", limit=0)
        ladder.push_async_callback(snapshotter.close)
        inner = ServiceClient.by(to_control, "the control plane", limit=0)  # no caller takes the feed's place
        ladder.push_async_callback(inner.close)
        spool = Spool.open(settings.spools, name)
        ladder.push_async_callback(asyncio.to_thread, spool.close)
        post = poster(control)
        shipper = await ladder.enter_async_context(Shipper(spool, post))
        ladder.push_async_callback(_flush, shipper)
        counted = await ladder.enter_async_context(open_rates(settings.redis, name, telemetry.page))
        errands = Errands()
        upstreams = Upstreams(ways, errands)
        ladder.push_async_callback(upstreams.close)
        ladder.push_async_callback(errands.close)

        table, timelines, under_way = Table(), Timelines(), UnderWay()
        told = choose_sink(
            settings.autoscaler, control, name, table.revisions.of, lambda: table.revisions.pools, counted.alive,
            telemetry.page,
        )  # fmt: skip
        backlogs = Backlogs(table.backlog_s, lambda key: throttler.queued(key), lambda key: throttler.pace(key))
        reporter = Reporter(told.sink, backlogs)

        def decided(line: Feed) -> None:
            line = msgspec.structs.replace(line, revision=table.revision)
            apply(line)
            last.learned(line)

        stand_in = StandIn(
            reporter.poke, directory,
            is_heard=lambda: feed.connected,
            machine=lambda: table.machine if last.counts() and not (is_apart or on_cluster) else None,
            tell=decided, asked_us=lambda key: waker.poked_us(key), page=telemetry.page,
        )  # fmt: skip
        ladder.push_async_callback(stand_in.close)
        waker = Waker(stand_in.poke)
        ladder.push_async_callback(waker.close)
        peers = Peers(name, counted.names, settings.subsets)
        throttler = Throttler(settings.queue, waker, longest_rest_s=settings.breaker_s, peers=peers)
        meters = Meters(telemetry.page)
        usage = Usage(spool, timelines, ended=Endings(meters, telemetry))
        budgets = Budgets(name, counted.budgets)
        tenants = asyncio.Event()

        proving = Proving(ways, lambda row: act(Feed(revision=table.revision, replicas=(row,))), telemetry.page)
        ladder.push_async_callback(proving.close)

        def apply(line: Feed) -> None:
            act(proving.take(line))

        def act(line: Feed) -> None:
            throttler.apply(line)  # who waits goes first
            table.apply(line)
            budgets.apply(line)
            if line.full or line.removed_replicas:
                upstreams.retain(throttler.addresses())
            if line.tenants:
                tenants.set()

        last = LastFeed(directory, table, settings.feed_age_s)

        def hear(line: Feed) -> None:
            line = from_afar(line) if is_apart else with_pods(line) if on_cluster else line
            apply(line)
            last.heard(line)

        feed = FeedClient(control, hear, name)
        limits, uses = settings.request, KeyUses(control)
        tokens = await ladder.enter_async_context(open_tokens(settings.issuers, telemetry.page))
        authenticator = Authenticator(table, uses, tokens, counts=last.counts)
        sender, retries = Sender(upstreams, usage.source), RetryBudgets[tuple[str, VersionKey]](RETRY_LIMITS)
        hedges = Hedges(throttler, sender, retries, meters) if settings.hedges else None
        attempts = Attempts(throttler, sender, retries, meters, hedges)
        answers, store = OwnAnswers(settings.once), counted.store
        of_keys = answers if store is None else SharedAnswers(store, "once", settings.once, answers)
        cached = OwnAnswers(settings.cache) if store is None else SharedAnswers(store, "cache", settings.cache)
        secret = _once_key(settings)
        cache = ResponseCache(secret, cached, settings.cache, errands, telemetry.page)
        once = Once(secret, of_keys, settings.once, telemetry.page)
        handover = HandoverSender(answers, once.running)
        ladder.push_async_callback(handover.close)
        # Activators with a shared store know the same keys already.
        receiver = await HandoverReceiver.connect(answers, directory) if store is None else None
        ladder.push_async_callback(once.close)
        allowances = Allowances(counted.entrance, counted.rates, budgets)
        asked = settings.firewall
        firewall = (
            None
            if asked is None
            else await ladder.enter_async_context(Firewall(asked.socket, asked.within_s, asked.unanswered, meters))
        )
        unread = Room(limits.requests, "the room for unread request bodies", "requests")
        door = Door(
            Completions(
                authenticator,
                table,
                throttler,
                reporter,
                attempts,
                usage,
                limits,
                allowances,
                under_way,
                once,
                cache,
                Ladders(table, throttler, reporter, cache.last),
                unread,
            ),
            Lists(authenticator, table, timelines, inner, under_way, unread),
            Passthrough(authenticator, {"admin": inner, "push": snapshotter}, limits),
            OpenInference(authenticator, table, unread),
            settings.domain,
            limits,
            meters,
            firewall,
        )
        describe(telemetry.page, door, throttler, shipper, feed, last, answers)
        listener = listen_for(settings.host, settings.port, settings.listener_fd)
        ladder.callback(listener.close)
        plain = None if settings.data_path is None else listen_plain(*settings.data_path)
        if plain is not None:
            ladder.callback(plain.close)
        own = directory.listen_unpublished(SOCKET)
        ladder.callback(directory.discard_unpublished, SOCKET)
        ladder.callback(own.close)
        log.info("listening", extra={"host": settings.host, "port": listener.getsockname()[1], "source": name})

        gate = Gate(certificates.listener, settings.edge, meters)

        def relieve() -> None:
            gate.relieved = True
            stop.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, relieve)

        def is_ready(is_told: Callable[[], bool] = told.is_heard) -> bool:
            knows = feed.synced.is_set() and last.counts()
            return knows and is_told() and not stop.is_set() and not PROCESS.failing()

        # All activators lose the autoscaler at once, and round our door there is no other way.
        is_open = partial(is_ready, told.was_heard)
        well = health(is_ready, is_open, lambda: readiness(feed, last, told.is_heard() if on_cluster else None))
        fronts = [serve_tls(door, gate, listener, stop, settings.drain_s)]
        if plain is not None:
            in_place = InPlace(door, table.revisions, is_ready)
            fronts.append(serve_plain(in_place, gate, plain, stop, settings.drain_s))
        background: dict[str, Body] = {
            "publish": lambda: _publish(directory, is_ready),
            "feed": feed.run,
            "kept feed": lambda: feed.begin_without(last.try_load, apply),
            "feed file": last.run,
            "reporter": reporter.run,
            "key uses": uses.run,
            "kept answers": once.run,
            **({} if receiver is None else {"inherited answers": receiver.receive}),
            **({} if store else {"handover": lambda: _hand_over(handover, answers, directory, stop)}),
            "response cache": cache.run,
            "leftover spools": lambda: ship_leftovers(settings.spools, post),
            **counted.loops,
            **told.loops,
            "certificates": lambda: certificates.follow(table.tenants, tenants),
            "heap": HeapTrimmer().run,
            **({} if tokens is None else {"issuers": tokens.run}),
            **({} if files is None else {"certificate files": files.follow}),
        }
        await _while_serving(
            background,
            _serve(settings, fronts, feed, stop),
            lambda ended: among.serve(telemetry.exposing(well), own, {}, ended, 1),
        )


async def _publish(directory: SocketDirectory, is_ready: Callable[[], bool]) -> None:
    """Take over the name of the activator's own socket. If an old activator still serves there, wait until ready.

    If this process never becomes ready, the old one stays reachable.
    """
    if directory.is_served(SOCKET):
        while not is_ready():  # noqa: ASYNC110 (it depends on several things, and no event stands for all of them)
            await asyncio.sleep(LOOK_S)
    directory.publish(SOCKET)


async def _hand_over(handover: HandoverSender, answers: OwnAnswers, directory: SocketDirectory, stop: Stop) -> None:
    """Once this activator decides on idempotency keys, let the next one connect. Hand over to it at `stop`."""
    await answers.decides.wait()
    await handover.listen(directory)
    await stop.wait()
    handover.hand_over()


async def _serve(
    settings: ActivatorSettings, fronts: list[Coroutine[object, object, None]], feed: FeedClient, stop: Stop
) -> None:
    """Run the listeners until `stop`. With an inherited socket, wait up to FIRST_FEED_S for the feed first.

    Callers can wait on that socket until this activator knows who may call.
    """
    if settings.listener_fd is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_FEED_S):
                await first(feed.synced.wait(), stop.wait())
    async with asyncio.TaskGroup() as tasks:
        for front in fronts:
            tasks.create_task(front)


def _certificate_files(settings: ActivatorSettings) -> CertificateFiles | None:
    if settings.certificates is None:
        return None
    try:
        return CertificateFiles(settings.certificates)
    except BadCertificate as bad:
        raise BadSetting("KELVIN_CERTIFICATES", str(settings.certificates), str(bad)) from bad


def _authority(settings: ActivatorSettings) -> Authority:
    try:
        return Authority.load_or_make(settings.data / "ca.pem", settings.data / "tls" / "ca.key")
    except BadAuthority as bad:
        raise BadSetting("KELVIN_DATA", str(settings.data), str(bad)) from bad


def _once_key(settings: ActivatorSettings) -> bytes:
    try:
        return ensure_once_key(settings.data / ONCE_KEY)
    except BadOnceKey as bad:
        raise BadSetting("KELVIN_DATA", str(settings.data), str(bad)) from bad


async def _while_serving(
    background: Mapping[str, Body],
    front: Coroutine[object, object, None],
    behind: Callable[[asyncio.Event], Coroutine[object, object, None]],
) -> None:
    """Serve until the front has drained. The background loops and the health endpoint run until then."""
    ended = asyncio.Event()
    async with Loops() as loops, asyncio.TaskGroup() as tasks:
        for name, body in background.items():
            loops.start(name, body)
        tasks.create_task(behind(ended))
        await front
        ended.set()
        await loops.close()


async def _flush(shipper: Shipper) -> None:
    if not await shipper.flush(Deadline.after(FLUSH_S, time.monotonic())):
        log.warning("records stay in the spool; the next activator ships them", extra={"shipper": repr(shipper)})


async def ship_leftovers(spools: Path, post: Post) -> None:
    """Ship what other activators left, until cancelled.

    One that ends while this one serves, as at a restart, may leave records that it could not ship in time.
    """
    while True:
        for recovered in await recover(spools, lambda source: post if source.startswith(PREFIX) else None):
            log.info("shipped a leftover spool", extra={"recovered": repr(recovered)})
        await asyncio.sleep(RECOVER_AGAIN_S)
