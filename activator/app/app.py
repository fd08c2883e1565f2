"""Run one activator: listen, serve until told to stop, drain, and close. `components.py` builds its parts."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

from activator.answers.answer_store import LocalAnswerStore
from activator.answers.answers_handover import HandoverSender
from activator.api.knative_data_path import KnativeDataPath
from activator.app.components import BuildContext, Components, build_components
from activator.app.health import build_health_app, read_readiness, register_gauges
from activator.app.settings import ActivatorSettings
from activator.http.exchange import new_request_id
from activator.http.listener_state import ListenerState
from activator.http.server import listen_for, listen_plain, serve_plain, serve_tls
from activator.routing.feed_client import FeedClient
from activator.tls.certificate_authority import BadCertificateAuthority, CertificateAuthority
from activator.tls.certificate_files import BadCertificate, CertificateFiles
from activator.tls.heap_trimmer import HeapTrimmer
from activator.tls.server_certificates import ServerCertificates
from kelvin.contracts.setting_parser import BadSetting
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.hardening import make_private
from kelvin.process.loops import PROCESS_HEALTH, Body, Loops
from kelvin.process.race import first_completed
from kelvin.process.service_lifecycle import Stop
from kelvin.spool import Post, recover
from kelvin.telemetry.telemetry import describe_certificates, open_telemetry

log = logging.getLogger(__name__)

RECOVER_AGAIN_S: Final = 10.0
SPOOL_PREFIX: Final = "activator-"
FIRST_FEED_S: Final = 5.0
SOCKET: Final = "activator.sock"
READY_POLL_S: Final = 0.02  # between readiness checks of a new activator


async def run(settings: ActivatorSettings, stop: Stop) -> None:
    """Serve until `stop`; then drain, flush the spool, and return."""
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    make_private(settings.data)
    authority, files = _authority(settings), _certificate_files(settings)
    certificates = ServerCertificates(authority, settings.domain, files, settings.host)
    async with AsyncExitStack() as stack:
        telemetry = await stack.enter_async_context(open_telemetry("activator", settings.telemetry))
        # unique to this process; also the spool's source
        name = SPOOL_PREFIX + new_request_id().removeprefix("req_")
        components = await build_components(BuildContext(settings, name, telemetry, stack))
        peers, queue, front_door = components.peers, components.queue, components.front_door
        feed, last_feed, load_reporting = queue.feed, queue.last_feed, queue.load_reporting
        describe_certificates(telemetry.page, lambda: {**certificates.expiries(), **peers.server.certificate_expiry()})
        register_gauges(telemetry.page, components)
        listener = listen_for(settings.host, settings.port, settings.listener_fd)
        stack.callback(listener.close)
        plain_listener = None if settings.data_path is None else listen_plain(*settings.data_path)
        if plain_listener is not None:
            stack.callback(plain_listener.close)
        own_socket = peers.directory.listen_unpublished(SOCKET)
        stack.callback(peers.directory.discard_unpublished, SOCKET)
        stack.callback(own_socket.close)
        log.info("listening", extra={"host": settings.host, "port": listener.getsockname()[1], "source": name})

        listener_state = ListenerState(certificates.listener, settings.connections, components.accounting.metrics)

        def on_replaced() -> None:
            listener_state.is_replaced = True
            stop.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, on_replaced)

        def is_ready(is_autoscaler_heard: Callable[[], bool] = load_reporting.is_connected) -> bool:
            has_feed = feed.synced.is_set() and last_feed.is_fresh()
            return has_feed and is_autoscaler_heard() and not stop.is_set() and not PROCESS_HEALTH.failing()

        # The autoscaler fails for all activators at once, and there is no way around them: being connected once is
        # enough.
        is_open = partial(is_ready, load_reporting.was_connected)
        health_app = build_health_app(
            is_ready,
            is_open,
            lambda: read_readiness(feed, last_feed, load_reporting.is_connected() if settings.is_on_cluster else None),
        )
        servers = [serve_tls(front_door, listener_state, listener, stop, settings.drain_s)]
        if plain_listener is not None:
            data_path = KnativeDataPath(front_door, queue.table.revisions, is_ready)
            servers.append(serve_plain(data_path, listener_state, plain_listener, stop, settings.drain_s))
        background = {
            "publish": lambda: _publish(peers.directory, is_ready),
            **build_background(settings, components, stop),
            "certificates": lambda: certificates.run(queue.table.tenants, queue.feed_applier.tenants_changed),
            **({} if files is None else {"certificate files": files.run}),
        }
        await _while_serving(
            background,
            _serve(settings, servers, feed, stop),
            lambda ended: peers.server.serve(telemetry.with_metrics_route(health_app), own_socket, {}, ended, 1),
        )


def build_background(settings: ActivatorSettings, components: Components, stop: Stop) -> dict[str, Body]:
    """Return the loops that run while requests are served, by their names in logs and metrics."""
    queue, auth, answers = components.queue, components.auth, components.answers
    background: dict[str, Body] = {
        "feed": queue.feed.run,
        "kept feed": lambda: queue.feed.start_from_last_feed(queue.last_feed.try_load, queue.apply_line),
        "feed file": queue.last_feed.run,
        "reporter": queue.reporter.run,
        "key uses": auth.key_uses.run,
        "kept answers": answers.idempotency.run,
        "response cache": answers.cache.run,
        "leftover spools": lambda: ship_leftovers(settings.spool_directory, components.accounting.post),
        "heap": HeapTrimmer().run,
        **components.limits.counters.loops,
        **queue.load_reporting.loops,
    }
    if answers.receiver is not None:
        background["inherited answers"] = answers.receiver.receive
    if components.limits.counters.store is None:
        background["handover"] = partial(
            hand_over_at_stop, answers.handover, answers.local_store, components.peers.directory, stop
        )
    if auth.token_verifier is not None:
        background["issuers"] = auth.token_verifier.run
    return background


async def _publish(directory: SocketDirectory, is_ready: Callable[[], bool]) -> None:
    """Take over the name of the activator's own socket. If an old activator still serves there, wait until ready. If
    this process never becomes ready, the old one stays reachable.
    """
    if directory.is_served(SOCKET):
        while not is_ready():  # noqa: ASYNC110 (it depends on several things, and no event stands for all of them)
            await asyncio.sleep(READY_POLL_S)
    directory.publish(SOCKET)


async def hand_over_at_stop(
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


async def ship_leftovers(spools: Path, post: Post) -> None:
    """Ship the spools that other activators left, until cancelled. An activator that ends while this one serves, as at
    a restart, may leave records that it could not ship in time.
    """
    while True:
        for recovered in await recover(spools, lambda source: post if source.startswith(SPOOL_PREFIX) else None):
            log.info("shipped a leftover spool", extra={"recovered": repr(recovered)})
        await asyncio.sleep(RECOVER_AGAIN_S)
