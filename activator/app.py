"""The activator's composition root: what exists, who knows whom, in which order it starts and ends."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Final

from activator.authenticate import Authenticator
from activator.authority import Authority
from activator.certificates import LOOK_AGAIN_S, Certificates
from activator.completions import Completions
from activator.door import Door
from activator.edge import Gate
from activator.endings import Endings
from activator.errands import Errands
from activator.exchange import new_request_id
from activator.feed import FeedClient
from activator.gauges import describe
from activator.health import health
from activator.key_uses import KeyUses
from activator.lists import Lists
from activator.meters import Meters
from activator.open_inference import OpenInference
from activator.passthrough import Passthrough
from activator.proxy import Upstreams
from activator.reporter import Reporter
from activator.server import listen, serve_tls
from activator.settings import ActivatorSettings
from activator.table import Table
from activator.throttler import Throttler
from activator.timelines import Timelines
from activator.usage import Usage, poster
from activator.wake import Waker
from contracts.control import Feed
from contracts.deadline import Deadline
from contracts.settings import BadSetting
from service.client import ServiceClient
from service.run import Stop, serve_until
from service.unix import SocketDirectory
from spool import Post, Shipper, Spool, recover
from telemetry.telemetry import open_telemetry

log = logging.getLogger(__name__)

FLUSH_S: Final = 5.0
RECOVER_AGAIN_S: Final = 10.0
PREFIX: Final = "activator-"


async def run(settings: ActivatorSettings, stop: Stop) -> None:
    """Serve until `stop`; then drain, flush the spool, and return."""
    name = PREFIX + new_request_id().removeprefix("req_")  # one process lifetime, and the spool's source
    authority = Authority.load_or_make(settings.data / "ca.pem", settings.data / "tls" / "ca.key")
    certificates = Certificates(authority, settings.domain)
    async with AsyncExitStack() as ladder:
        telemetry = await ladder.enter_async_context(open_telemetry("activator", settings.telemetry))
        directory = SocketDirectory(settings.run)
        ladder.callback(directory.close)
        control = ServiceClient(directory, "control.sock", "the control plane")
        ladder.push_async_callback(control.close)
        snapshotter = ServiceClient(directory, "snapshotter.sock", "the snapshotter")
        ladder.push_async_callback(snapshotter.close)
        inner = ServiceClient(directory, "control.sock", "the control plane")  # a busy admin takes no feed's place
        ladder.push_async_callback(inner.close)
        spool = Spool.open(settings.spools, name)
        ladder.push_async_callback(asyncio.to_thread, spool.close)
        post = poster(control)
        shipper = await ladder.enter_async_context(Shipper(spool, post))
        ladder.push_async_callback(_flush, shipper)
        errands = Errands()
        upstreams = Upstreams(directory, errands)
        ladder.push_async_callback(upstreams.close)
        ladder.push_async_callback(errands.close)

        table, timelines = Table(), Timelines()
        reporter = Reporter(control, name)
        waker = Waker(reporter)
        ladder.push_async_callback(waker.close)
        throttler = Throttler(settings.queue, waker)
        meters = Meters(telemetry.page)
        usage = Usage(spool, timelines, ended=Endings(meters, telemetry))
        tenants = asyncio.Event()

        def apply(line: Feed) -> None:
            throttler.apply(line)  # who waits goes first
            table.apply(line)
            if line.full or line.removed_replicas:
                upstreams.retain(throttler.addresses())
            if line.tenants:
                tenants.set()

        feed = FeedClient(control, apply)
        limits, uses = settings.request, KeyUses(control)
        authenticator = Authenticator(table, uses)
        door = Door(
            Completions(authenticator, table, throttler, waker, reporter, upstreams, usage, limits),
            Lists(authenticator, table, timelines, control),
            Passthrough(authenticator, {"admin": inner, "push": snapshotter}, limits),
            OpenInference(authenticator, table),
            settings.domain,
            limits,
            meters,
        )
        describe(telemetry.page, door, throttler, shipper, feed)
        listener = _listen(settings)
        ladder.callback(listener.close)
        own = directory.listen("activator.sock")
        ladder.callback(own.close)
        log.info("listening", extra={"host": settings.host, "port": listener.getsockname()[1], "source": name})

        well = health(lambda: feed.synced.is_set() and not stop.is_set())
        background = [
            feed.run(),
            reporter.run(),
            uses.run(),
            _recover(settings, post),
            _follow_tenants(certificates, table, tenants),
        ]
        await _while_serving(
            background,
            serve_tls(door, Gate(certificates.listener, settings.edge), listener, stop, settings.drain_s),
            lambda ended: serve_until(telemetry.exposing(well), own, ended, 1),
        )


def _listen(settings: ActivatorSettings) -> socket.socket:
    try:
        return listen(settings.host, settings.port)
    except socket.gaierror as error:
        raise BadSetting("KELVIN_HOST", settings.host, error.strerror or "is no address") from error
    except OSError as error:
        rule = f"{settings.host} refuses it: {os.strerror(error.errno or errno.EINVAL)}"
        raise BadSetting("KELVIN_PORT", str(settings.port), rule) from error


async def _while_serving(
    background: list[Coroutine[object, object, None]],
    front: Coroutine[object, object, None],
    behind: Callable[[asyncio.Event], Coroutine[object, object, None]],
) -> None:
    """Until the front has drained; health is told until then, and the loops go on as the drain needs them."""
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(loop) for loop in background]
        tasks.create_task(behind(ended))
        await front
        ended.set()
        for loop in loops:
            loop.cancel()


async def _flush(shipper: Shipper) -> None:
    if not await shipper.flush(Deadline.after(FLUSH_S, time.monotonic())):
        log.warning("records stay in the spool; the next activator ships them", extra={"shipper": repr(shipper)})


async def _recover(settings: ActivatorSettings, post: Post) -> None:
    """Ship what activators before us left, until nothing remains."""
    while True:
        report = await recover(settings.spools, lambda source: post if source.startswith(PREFIX) else None)
        for recovered in report:
            log.info("shipped a leftover spool", extra={"recovered": repr(recovered)})
        if not any(recovered.remaining for recovered in report):
            return
        await asyncio.sleep(RECOVER_AGAIN_S)


async def _follow_tenants(certificates: Certificates, table: Table, changed: asyncio.Event) -> None:
    """A leaf for each tenant that the feed names, and new ones in time; made off the loop."""
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), LOOK_AGAIN_S)
        changed.clear()
        await certificates.ensure(table.tenants())
