"""Attempts at fake replicas over their sockets, in this process: every slot, connection and task can be inspected."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from activator.accounting.metrics import RequestMetrics
from activator.accounting.request_account import Account
from activator.queue.policy.queued_request import PriorityClass
from activator.queue.throttler import Throttler
from activator.request.attempts import Attempts
from activator.request.hedge_policy import HedgeLimits
from activator.request.hedged_request import Hedges
from activator.request.inference_request import InferenceRequest, UpstreamRequestFactory
from activator.request.retry_policy import RetryBudgets, RetryLimits
from activator.routing.policy.request_body import RequestBody
from activator.routing.policy.version_key import VersionKey
from activator.upstream.background_tasks import BackgroundTasks
from activator.upstream.replica_sessions import ReplicaSessions
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.serving.control_messages import Principal, Scope, TenantLimits
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.timeline import Timeline
from kelvin.ipc.connector import ConnectorFactory
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.telemetry.policy.instruments import MetricsPage
from tests.activator.control import replica_row
from tests.activator.queue.slot_world import KEY, REQUEST, SlotWorld
from tests.activator.replica import FakeReplica, Script, hello

HEDGE_AT_ONCE = HedgeLimits(
    min_samples=1, shortest_late_s=0.0
)  # a frame that has not come by the next loop iteration is late


class FakeClientResponse:
    """The client's side of one answer, replacing `ClientResponse`."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.heard = b""

    async def relay_data(self, data: bytes, completion_tokens: int) -> None:
        """Accept bytes. The client has read them at once."""
        self.heard += data
        self._account.delivered_tokens = completion_tokens

    def try_discard_data(self) -> bool:
        """Forget the answer. Return False if the client has some of it."""
        if self.heard:
            return False
        self._account.counts = Counts()
        return True


@dataclass
class SentRequest:
    """A running request, and what its client has received."""

    call: InferenceRequest
    ear: FakeClientResponse
    task: "asyncio.Task[None]"

    @property
    def name(self) -> str:
        """The request id."""
        return self.call.account.request_id


@dataclass
class HedgeWorld:
    """`Attempts` over fake replicas, and everything that they need."""

    slots: SlotWorld
    replica_sessions: ReplicaSessions
    background_tasks: BackgroundTasks
    attempts: Attempts
    page: MetricsPage
    run: Path
    replicas: dict[str, FakeReplica] = field(default_factory=dict)
    asked: list[SentRequest] = field(default_factory=list)

    @property
    def throttler(self) -> Throttler:
        """The throttler that assigns slots to the attempts."""
        return self.slots.throttler

    async def replica(self, name: str, script: Script = hello, max_streams: int = 8) -> FakeReplica:
        """Start a replica and publish it."""
        replica = self.replicas[name] = FakeReplica(script)
        await replica.start(self.run, name)
        self.slots.feed(replica_row(name, max_streams))
        return replica

    def ask(
        self, *, cold: bool = False, deadline_s: float = 60.0, is_current: Callable[[], bool] = lambda: True
    ) -> SentRequest:
        """Start a streaming request."""
        account = Account(
            request_id=f"req_{len(self.asked)}", model="m",
            principal=Principal(key_id="k", tenant="default", scopes=(Scope.INFER,)),
            stream=True, started_at_us=1, timeline=Timeline(0), cold=cold,
        )  # fmt: skip
        nothing = cast(Any, None)
        call = InferenceRequest(
            nothing, "/v1/chat/completions", b'{"stream": true}', RequestBody(), PriorityClass.INTERACTIVE, None,
            nothing, nothing, account, Deadline.after(deadline_s, time.monotonic()), TenantLimits(),
        )  # fmt: skip
        ear = FakeClientResponse(account)
        serving = self.attempts.serve(KEY, REQUEST, call, cast(Any, ear), is_current)
        self.asked.append(SentRequest(call, ear, asyncio.create_task(serving)))
        return self.asked[-1]

    async def warm_up(self) -> None:
        """Serve one request, so that `limits` have their sample and a later first frame can be late."""
        assert await outcome(self.ask()) is None

    def counter_values(self, name: str) -> dict[tuple[str, ...], int]:
        """Return the values of a counter, by labels."""
        (family,) = [each for each in self.page.families() if each.name == name]
        return {labels: int(value) for labels, value in family.values.items()}

    def hedge_outcomes(self) -> dict[str, int]:
        """Return how many requests were late, by the attempt whose first frame came."""
        return {labels[-1]: value for labels, value in self.counter_values("kelvin_hedged_requests_total").items()}

    async def wait_idle(self) -> None:
        """Wait until nothing runs. Assert that no slot, connection or task is left, and that each replica that counted
        a request knows whether its record names that replica.
        """
        async with asyncio.timeout(30):
            await self.background_tasks.close()
            while self._running() or any(replica.running for replica in self.replicas.values()):
                await asyncio.sleep(0.001)
                await self.background_tasks.close()
        self.throttler.check_integrity()
        assert all(session.active_requests == 0 for session in self.replica_sessions._sessions.values())
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "second"]
        recorded = {(each.name, each.call.account.runtime_id) for each in self.asked}
        for name, replica in self.replicas.items():
            for heard in replica.calls:
                if heard.answer is not None and not heard.is_cut and (heard.request_id, name) not in recorded:
                    assert heard.request_id in replica.answered_elsewhere, (heard.request_id, name)
                if heard.request_id in replica.answered_elsewhere:
                    assert (heard.request_id, name) not in recorded

    def _running(self) -> int:
        return sum(
            replica.running for line in self.throttler._version_queues.values() for replica in line.replicas.values()
        )


async def outcome(asked: SentRequest) -> BaseException | None:
    """Wait for the request's end. Return its refusal, or None if it was answered."""
    async with asyncio.timeout(30):
        await asyncio.wait((asked.task,))
    return asked.task.exception()


@asynccontextmanager
async def ground(
    tmp_path: Path, limits: HedgeLimits = HEDGE_AT_ONCE, retries: RetryLimits | None = None, rest_s: float = 30.0
) -> AsyncIterator[HedgeWorld]:
    """Yield attempts over fake replicas. At the end nothing of any request may be left."""
    directory, background_tasks = SocketDirectory(tmp_path / "run"), BackgroundTasks()
    slots = SlotWorld(longest_open_s=rest_s)
    replica_sessions, page = ReplicaSessions(ConnectorFactory(directory), background_tasks), MetricsPage("activator")
    request_factory, metrics = UpstreamRequestFactory(replica_sessions, "activator-1"), RequestMetrics(page)
    budgets = RetryBudgets[tuple[str, VersionKey]](retries or RetryLimits())
    hedges = Hedges(slots.throttler, request_factory, budgets, metrics, limits)
    attempts = Attempts(slots.throttler, request_factory, budgets, metrics, hedges)
    here = HedgeWorld(slots, replica_sessions, background_tasks, attempts, page, directory.path)
    try:
        yield here
        await here.wait_idle()
    finally:
        await replica_sessions.close()
        for replica in here.replicas.values():
            await replica.stop()
        directory.close()
