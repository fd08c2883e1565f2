"""A throttler in this process, with a hand-fed feed, a recording waker, and requests that take slots. Time is the event
loop's, which passes at once in a test marked `virtual_time`, or that of a `Clock`.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from activator.queue.circuit_breakers import LONGEST_S
from activator.queue.policy.admission import QueueLimits
from activator.queue.policy.queue_bounds import QueueLimit
from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.policy.wait_estimate import MIN_ANSWERS
from activator.queue.slot_allocator import ALONE, ActivatorPeers
from activator.queue.throttler import Throttler
from activator.queue.version_queue import Replica
from activator.queue.waker import Waker
from activator.routing.policy.version_key import VersionKey
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.serving.control_messages import Feed, ReplicaRow, RestoreFailure
from tests.activator.clock import Clock
from tests.activator.control import VERSION

KEY = VersionKey("default", "m", VERSION)
REQUEST = QueuedRequest("default", 10, 10)
FAILED = RestoreFailure(
    tenant="default", version=VERSION, code="probe_failed", status=500, message="no", retryable=False
)


@dataclass
class RecordingWaker(Waker):
    """A waker that only records its calls."""

    woken: list[VersionKey] = field(default_factory=list)
    waking: set[VersionKey] = field(default_factory=set)
    timed_wakes: dict[VersionKey, float] = field(default_factory=dict)

    def start_wake(self, key: VersionKey) -> None:
        if key not in self.waking:
            self.woken.append(key)
            self.waking.add(key)

    def stop_wake(self, key: VersionKey) -> None:
        self.waking.discard(key)

    def start_wake_for(self, key: VersionKey, for_s: float) -> None:
        self.timed_wakes[key] = for_s

    def stop_timed_wakes(self, tenant: str, version: str) -> None:
        for key in [key for key in self.timed_wakes if (key.tenant, key.version) == (tenant, version)]:
            del self.timed_wakes[key]

    def wake_sent_us(self, key: VersionKey) -> int | None:
        return 1 if key in self.waking else None


def queue_limits(*, version: int = 10_000, total: int = 1 << 20, wait_s: float = 60.0) -> QueueLimits:
    """Return limits on how many requests of one version may wait, and how many in all. Their size is not limited."""
    of_version, of_all = (QueueLimit(entries, 1 << 40, 1 << 40) for entries in (version, total))
    return QueueLimits(of_version, of_all, of_all, wait_s)


async def run_loop(count: int = 3) -> None:
    """Let the event loop run for `count` iterations."""
    for _ in range(count):
        await asyncio.sleep(0)


def failure_of(task: "asyncio.Task[Any]") -> Failure:
    """Return why the request was refused."""
    error = task.exception()
    assert isinstance(error, Refused), error
    return error.failure


class SlotWorld:
    """A throttler that knows these replicas. `waits` lists, by tenant, the seconds that each served request waited."""

    def __init__(
        self,
        *rows: ReplicaRow,
        limits: QueueLimits | None = None,
        clock: Callable[[], float] | None = None,
        draw: Callable[[int], int] = lambda n: 0,
        peers: ActivatorPeers = ALONE,
        longest_open_s: float = LONGEST_S,
    ) -> None:
        self.clock = clock or asyncio.get_running_loop().time
        self.waker = RecordingWaker()
        self.throttler = Throttler(
            limits or queue_limits(),
            self.waker,
            longest_open_s=longest_open_s,
            peers=peers,
            clock=self.clock,
            draw=draw,
        )
        self.waits: defaultdict[str, list[float]] = defaultdict(list)
        self.feed(*rows)

    def feed(self, *rows: ReplicaRow, **line: Any) -> None:
        """Apply a line of the feed with these replicas."""
        self.throttler.apply(Feed(revision=1, replicas=rows, **line))

    def replica(self, name: str) -> Replica:
        """Return the replica of that name, of the version KEY."""
        return self.throttler.slot_allocator.ensure_version_queue(KEY).replicas[name]

    async def acquire(
        self,
        request: QueuedRequest = REQUEST,
        in_s: float = 50.0,
        key: VersionKey = KEY,
        retry_by_s: float | None = None,
    ) -> Replica:
        """Wait for a slot. The caller must call `release`."""
        return await self.throttler.acquire(key, request, Deadline.after(in_s, self.clock()), retry_by_s)

    async def start_request(
        self, request: QueuedRequest = REQUEST, in_s: float = 50.0, key: VersionKey = KEY
    ) -> "asyncio.Task[Replica]":
        """Start a request. On return it has a slot, waits for one, or was refused."""
        task = asyncio.create_task(self.acquire(request, in_s, key))
        await run_loop()
        self.throttler.check_integrity()
        return task

    def release(self, replica: Replica, request: QueuedRequest = REQUEST, tokens: int | None = None) -> None:
        """Release the slot of a request that used so many tokens (None: as estimated)."""
        self.throttler.slot_allocator.release(KEY, replica, request, tokens)

    async def cancel_requests(self, *tasks: "asyncio.Task[Replica]") -> None:
        """Cancel these requests, and assert that no other one waits."""
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self.throttler.check_integrity()
        assert self.throttler.usage_by_tenant.total.entries == 0

    async def measure_throughput(self, clock: Clock, request: QueuedRequest = REQUEST) -> None:
        """Serve enough requests of two seconds each that the throughput is known."""
        for _ in range(MIN_ANSWERS):
            replica = await self.acquire(request, 1e6)
            clock.now_s += 2.0
            self.release(replica, request)

    async def serve(self, request: QueuedRequest, answer_duration_s: float, in_s: float = 50.0) -> None:
        """Serve one request from its arrival to the end of its answer. Raises what `Throttler.slot` raises."""
        enqueued_at_s = self.clock()
        async with self.throttler.slot(KEY, request, Deadline(enqueued_at_s + in_s)):
            self.waits[request.tenant].append(self.clock() - enqueued_at_s)
            await asyncio.sleep(answer_duration_s)

    async def arrivals(
        self, request: QueuedRequest, at_s: Iterable[float], answer_duration_s: float, in_s: float = 50.0
    ) -> None:
        """Serve a request at each of these times of the loop, whether or not earlier ones have ended."""
        serving = []
        for time_s in at_s:
            await asyncio.sleep(time_s - self.clock())
            serving.append(asyncio.ensure_future(self.serve(request, answer_duration_s, in_s)))
        await asyncio.gather(*serving)
        self.throttler.check_integrity()

    def p95_s(self, tenant: str) -> float:
        """Return the wait that 95 % of the tenant's requests do not exceed."""
        waits = sorted(self.waits[tenant])
        return waits[int(len(waits) * 0.95)]
