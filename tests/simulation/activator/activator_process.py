"""One activator process: the modules as `activator.app.components` builds them, its start, end and death.

Its stored feed and its handover socket are in `run`, its records in `spools`. They outlive it.
"""

import asyncio
import errno
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final

from activator.accounting.in_flight_requests import InFlightRequests
from activator.accounting.metrics import RequestMetrics
from activator.accounting.timelines import Timelines
from activator.accounting.usage_records import CompletionLog, UsageRecords, ledger_poster
from activator.answers.answer_store import LocalAnswerStore
from activator.answers.answers_handover import HandoverReceiver, HandoverSender
from activator.answers.idempotency import Idempotency
from activator.answers.idempotency_policy import CACHE_LIMITS, DEFAULT_LIMITS
from activator.answers.response_cache import ResponseCache
from activator.api.completions import Completions
from activator.api.front_door import FrontDoorApp
from activator.api.inference_handler import InferenceHandler
from activator.api.inference_runner import InferenceRunner
from activator.api.lookup_routes import LookupRoutes
from activator.api.open_inference_metadata import OpenInferenceMetadata
from activator.api.passthrough import Passthrough
from activator.api.version_resolver import VersionResolver
from activator.app import app
from activator.app.components import flush_spool
from activator.app.feed_applier import FeedApplier
from activator.auth.authenticator import Authenticator
from activator.auth.key_uses import KeyUses
from activator.degradation.degradation import Degradation
from activator.http.exchange import RequestLimits
from activator.limits.concurrency_limits import LocalConcurrencyLimiter, SharedCapacity
from activator.limits.rate_limits import LocalRateCounter, RateLimits
from activator.limits.tenant_budgets import TenantBudgets
from activator.queue.policy.admission import QueueLimits
from activator.queue.throttler import Throttler
from activator.queue.waker import Waker
from activator.request.attempts import Attempts
from activator.request.hedged_request import Hedges
from activator.request.inference_request import UpstreamRequestFactory
from activator.request.retry_policy import LIMITS as RETRY_LIMITS
from activator.request.retry_policy import RetryBudgets
from activator.request.tenant_limits import TenantLimiter
from activator.routing import last_feed
from activator.routing.feed_client import FeedClient
from activator.routing.last_feed import LastFeed
from activator.routing.policy.version_key import VersionKey
from activator.routing.routing_table import RoutingTable
from activator.scale_link.backlogs import Backlogs
from activator.scale_link.load_reporter import LoadReporter
from activator.scale_link.report_sinks import ControlSink
from activator.upstream.background_tasks import BackgroundTasks
from activator.upstream.replica_sessions import ReplicaSessions
from kelvin.contracts.serving.control_messages import Feed
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.spool import Shipper
from kelvin.telemetry.telemetry import open_without_traces
from tests.simulation.activator.fake_control_plane import ControlClient, FakeControlPlane
from tests.simulation.activator.simulated_client import SimulatedClient
from tests.simulation.core.fake_network import ClientSide, Network
from tests.simulation.core.faulty_spool import FaultyDisk, close_files, freeze_spool, open_spool
from tests.simulation.core.world import InjectedError, World

REQUEST_LIMITS: Final = RequestLimits(
    body_bytes=4096, body_bytes_in_all=64 << 10, upload_bytes=4096, body_s=5.0, deadline_s=60.0, stall_s=20.0,
    requests=200,
)  # fmt: skip
FEED_AGE_S: Final = 14_400.0
LOOK_S: Final = 1.0
SECRET: Final = b"s" * 32


@dataclass(frozen=True)
class Settings:
    """The settings of all processes of one history."""

    queue: QueueLimits
    hedges: bool


class _FaultyPoke:
    """A wake sender that sometimes has no file descriptors."""

    def __init__(self, reporter: LoadReporter) -> None:
        self._reporter = reporter
        self.fails = False
        self.poked_s: dict[VersionKey, float] = {}

    async def send_wake(self, key: VersionKey) -> bool:
        self.poked_s[key] = asyncio.get_running_loop().time()
        if self.fails:
            raise InjectedError(errno.EMFILE, "Too many open files")
        return await self._reporter.send_wake(key)


class _Sockets(SocketDirectory):
    """The run directory. Replicas listen on the simulated network."""

    def __init__(self, path: Path, network: Network) -> None:
        super().__init__(path)
        self._network = network

    def connect(self, name: str, *_: Any, **__: Any) -> Any:
        if name not in self._network.servers:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {name}")
        return SimpleNamespace(close=lambda: None)


class ActivatorProcess:
    """An activator process. It accepts requests once `accepts` is set, until it ends or dies."""

    def __init__(
        self,
        world: World,
        number: int,
        settings: Settings,
        network: Network,
        control: FakeControlPlane,
        disk: FaultyDisk,
        random: Random,
    ) -> None:
        """Raises OSError if the disk refuses its spool."""
        self._world = world
        self.name = f"{app.SPOOL_PREFIX}{number}"
        clocks = world.clocks
        self.callers: list[SimulatedClient] = []
        self.accepts = asyncio.Event()
        self.stop = asyncio.Event()  # no new requests are accepted
        self.is_dead = False
        self._tasks: list[asyncio.Task[Any]] = []
        self.spools = world.directory / "spool"
        self.spool = open_spool(self.spools, self.name, disk)
        self._near = ClientSide(network)
        self._directory = _Sockets(world.directory / "run", network)
        self._control = control
        self._client = client = ControlClient(control)
        telemetry = open_without_traces("activator")
        page = telemetry.page
        self.shipper = Shipper(self.spool, ledger_poster(client))
        self.background_tasks = BackgroundTasks()
        self.replica_sessions = ReplicaSessions(self._near, self.background_tasks)  # type: ignore[arg-type]
        self.table, timelines, self.under_way = RoutingTable(), Timelines(), InFlightRequests()
        backlogs = Backlogs(
            self.table.backlog_s,
            lambda key: self.throttler.queue_length(key),
            lambda key: self.throttler.throughput(key),
        )
        self.reporter = LoadReporter(ControlSink(client, self.name), backlogs, clock=clocks.monotonic)
        self.send_wake = _FaultyPoke(self.reporter)
        self.waker = Waker(self.send_wake.send_wake, clock=clocks.monotonic)
        self.throttler = Throttler(
            settings.queue, self.waker, longest_open_s=5.0, clock=clocks.monotonic,
            draw=Random(random.random()).randrange,
        )  # fmt: skip
        metrics = RequestMetrics(page)
        self.budgets = TenantBudgets(self.name, wall_s=clocks.wall)
        usage = UsageRecords(self.spool, timelines, on_end=CompletionLog(metrics, telemetry), wall_clock=clocks.wall)
        self.last = LastFeed(self._directory, self.table, FEED_AGE_S, clock=clocks.monotonic, wall_s=clocks.wall)
        self._apply = FeedApplier(self.throttler, self.table, self.budgets, self.replica_sessions).apply
        self.feed = FeedClient(client, self._hear, self.name)
        self._uses = KeyUses(client)
        authenticator = Authenticator(self.table, self._uses, is_fresh=self.last.is_fresh, wall_clock=clocks.wall)
        request_factory, retries = (
            UpstreamRequestFactory(self.replica_sessions, usage.source),
            RetryBudgets[tuple[str, VersionKey]](RETRY_LIMITS),
        )
        hedges = Hedges(self.throttler, request_factory, retries, metrics) if settings.hedges else None
        attempts = Attempts(
            self.throttler, request_factory, retries, metrics, hedges, draw=Random(random.random()).random
        )
        self.answers = LocalAnswerStore(DEFAULT_LIMITS, clocks.monotonic)
        self.cache = ResponseCache(
            SECRET, LocalAnswerStore(CACHE_LIMITS, clocks.monotonic), CACHE_LIMITS, self.background_tasks, page
        )
        self.once = Idempotency(SECRET, self.answers, DEFAULT_LIMITS, page)
        self.handover = HandoverSender(self.answers, self.once.list_running_keys)
        self.shares = LocalConcurrencyLimiter()
        tenant_limiter = TenantLimiter(
            self.shares,
            RateLimits(LocalRateCounter(clocks.monotonic), LocalRateCounter(clocks.monotonic)),
            self.budgets,
        )
        unread = SharedCapacity(REQUEST_LIMITS.requests, "the room for unread request bodies")
        handler = InferenceHandler(
            VersionResolver(self.table, self.throttler, usage), self.cache,
            Degradation(self.table, self.throttler, self.reporter, self.cache.old_responses, clocks.monotonic),
            attempts, self.throttler, self.reporter, tenant_limiter,
        )  # fmt: skip
        runner = InferenceRunner(handler, self.throttler, usage, tenant_limiter, self.under_way, REQUEST_LIMITS.hold_s)
        completions = Completions(authenticator, self.table, tenant_limiter, REQUEST_LIMITS, unread, self.once, runner)
        self.door = FrontDoorApp(
            completions, LookupRoutes(authenticator, self.table, timelines, client, self.under_way, unread),
            Passthrough(authenticator, {}, REQUEST_LIMITS), OpenInferenceMetadata(authenticator, self.table, unread),
            "kelvin.local", REQUEST_LIMITS, metrics,
        )  # fmt: skip
        self.wanted_since_s: dict[VersionKey, float] = {}
        self.began_s = world.loop.time()
        self.has_kept_feed = (self._directory.path / last_feed.NAME).exists()
        self._ending: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<ActivatorProcess {self.name}>"

    async def start(self) -> None:
        """Return once it accepts: with the first feed, or some seconds without one."""
        receiver = await HandoverReceiver.connect(self.answers, self._directory)
        if self.is_dead:
            if receiver is not None:
                receiver._writer.close()
            return
        self._live("feed", self.feed.run())
        self._live("feed file", self.last.run())
        self._live("reporter", self.reporter.run())
        self._live("key uses", self._uses.run())
        self._live("answers", self.once.run())
        self._live("cache", self.cache.run())
        self._live("shipper", self.shipper.run())
        self._live("look", self._look())
        self._start("kept feed", self.feed.start_from_last_feed(self.last.try_load, self._apply))
        if receiver is not None:
            self._start("inherited answers", receiver.receive())
        self._live("leftover spools", app.ship_leftovers(self.spools, ledger_poster(self._client)))
        stop: Any = self.stop
        self._start("handover", app.hand_over_at_stop(self.handover, self.answers, self._directory, stop))
        with suppress(TimeoutError):
            async with asyncio.timeout(app.FIRST_FEED_S):
                await self.feed.synced.wait()
        if not self.is_dead:
            self.accepts.set()

    def take(self, caller: SimulatedClient) -> None:
        """Accept the caller's connection."""
        self.callers.append(caller)
        caller.begin(self.door)

    def begin_end(self, drain_s: float) -> None:
        """Stop accepting. Finish requests in flight for `drain_s`, hand over, and ship the spool."""
        self.stop.set()
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(drain_s), name=f"end of {self.name}")

    async def ended(self) -> None:
        """Wait until it has ended or is dead."""
        if self._ending is not None:
            await asyncio.wait({self._ending})

    async def _end(self, drain_s: float) -> None:
        under_way = [caller.task for caller in self.callers if caller.task is not None and not caller.is_over]
        if under_way:
            await asyncio.wait(under_way, timeout=drain_s)
        await self._end_requests()
        await self._end_loops(but="shipper")
        await self.once.close()
        await self.handover.close()
        await self.waker.close()
        await self.background_tasks.close()
        await self.replica_sessions.close()
        await flush_spool(self.shipper)
        await self._end_loops()
        self.spool.close()
        self._directory.close()

    async def kill(self) -> None:
        """Kill it now. From here on, nothing of it reaches a disk, a replica, the control plane or a caller."""
        self.is_dead = True
        self.stop.set()
        if self._ending is not None:
            self._ending.cancel()
            await self.ended()
        self._client.die()
        self._near.die()
        freeze_spool(self.spool)
        for caller in self.callers:
            caller.cut()
        if (server := self.handover._server) is not None:
            server.close()
        for writer in self.handover._successors.values():
            writer.transport.abort()
        await self._end_requests()
        await self._end_loops()
        await self.once.close()
        await self.waker.close()
        await self.background_tasks.close()
        await self.replica_sessions.close()
        close_files(self.spool.path)
        self._directory.close()

    async def _end_requests(self) -> None:
        tasks = [caller.task for caller in self.callers if caller.task is not None and not caller.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _live(self, name: str, loop: Awaitable[Any]) -> None:
        self._tasks.append(self._world.start_loop(loop, f"{name} of {self.name}"))

    def _start(self, name: str, work: Awaitable[Any]) -> None:
        """Run a task that ends by itself."""
        task = asyncio.ensure_future(work)
        task.set_name(f"{name} of {self.name}")
        self._tasks.append(task)

    async def _end_loops(self, but: str = "") -> None:
        ending = [task for task in self._tasks if not but or not task.get_name().startswith(but)]
        self._tasks = [task for task in self._tasks if task not in ending]
        await self._world.end_loops(ending)

    def _hear(self, line: Feed) -> None:
        self._apply(line)
        self.last.record_received(line)

    async def _look(self) -> None:
        """Note since when versions are wanted."""
        while True:
            now_s = asyncio.get_running_loop().time()
            wanted = {key for key in self._control.versions if self.throttler.slot_allocator.needs_wake(key)}
            self.wanted_since_s = {key: self.wanted_since_s.get(key, now_s) for key in wanted}
            await asyncio.sleep(LOOK_S)
