"""Failover of the control plane: only the leader serves, and it waits again after losing the lead. In virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from starlette.types import Message

from controlplane import dependencies
from controlplane.app.failover import serve_while_leading
from controlplane.app.health import Health
from controlplane.app.role_label import LABEL_POLL_S, RoleLabel
from controlplane.knative.apply.cluster import Json, Ref
from tests.controlplane.app.candidates import FakeLeaseStore, FakeRolePods, LeaseConnection
from tests.controlplane.virtual_time import VirtualClock, settle


class ControlPlaneProcess:
    """One control-plane process with a fake Lease, and the history of its service."""

    def __init__(self, pods: FakeRolePods | None = None, pod: str = "one") -> None:
        self.clock, self.store, self.stop = VirtualClock(), FakeLeaseStore(), asyncio.Event()
        self.pods, self.pod, self.health = pods, pod, Health(self.stop)
        self.line = LeaseConnection(self.store, self.clock)
        self.seen: list[str] = []
        self.end = asyncio.Event()

    async def serve(self) -> None:
        """Serve until `end` is set or the task is cancelled."""
        self.seen.append("began")
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.seen.append("cut")
            raise
        self.seen.append("ended")

    def run(self, serve: Callable[[], Awaitable[None]] | None = None) -> asyncio.Task[None]:
        """Start the process as the application does."""
        role = None if self.pods is None else RoleLabel(self.pods, "kelvin", self.pod, self.clock, jitter=lambda: 0.5)
        work = serve_while_leading(self.line, "kelvin", self.health, self.clock, self.stop, serve or self.serve, role)
        return asyncio.create_task(work)

    def other_process(self, pod: str) -> "ControlPlaneProcess":
        """Return another process of the same cluster."""
        other = ControlPlaneProcess(self.pods, pod)
        other.clock, other.store, other.line = self.clock, self.store, LeaseConnection(self.store, self.clock)
        return other

    async def readiness(self) -> tuple[int, str]:
        """Return the answer of `/readyz`."""
        said: list[Message] = []

        async def receive() -> Message:
            raise AssertionError

        async def send(message: Message) -> None:
            said.append(message)

        await self.health({"type": "http", "method": "GET", "path": "/readyz"}, receive, send)
        return said[0]["status"], said[1]["body"].decode()

    async def until(self, what: str, times: int) -> None:
        """Advance time until `what` was seen `times` times, for at most five minutes."""
        for _ in range(300):
            if self.seen.count(what) >= times:
                return
            await self.clock.advance(1.0)
        raise AssertionError(f"{what} {times} times: {self.seen}")

    def another_process_leads(self) -> None:
        """Write the Lease as another holder that has just renewed it."""
        (lease,) = self.store.kept.values()
        spec = {**lease["spec"], "holderIdentity": "another", "leaseDurationSeconds": 15}
        self.store.write({**lease, "spec": spec}, new=False)


async def test_finished_leader_gives_up_the_lead() -> None:
    """The Lease has no holder after the service has ended."""
    it = ControlPlaneProcess()
    task = it.run()
    await it.clock.advance(1.0)
    it.end.set()
    await it.clock.advance(1.0)
    await task
    assert it.seen == ["began", "ended"]
    (lease,) = it.store.kept.values()
    assert not lease["spec"].get("holderIdentity")


async def test_lost_lead_cancels_and_restarts_the_service() -> None:
    """The service is cancelled at once. It starts again after the other holder's Lease has expired."""
    it = ControlPlaneProcess()
    task = it.run()
    await it.clock.advance(1.0)
    it.another_process_leads()
    await it.clock.advance(10.0)
    assert it.seen == ["began", "cut"]
    await it.clock.advance(10.0)
    assert it.seen == ["began", "cut", "began"]
    it.end.set()
    await it.clock.advance(1.0)
    await task
    assert it.seen[-1] == "ended"


async def test_repeated_loss_of_the_lead_backs_off() -> None:
    """Each start opens every connection. While the cluster answers slowly, it must not start every few seconds."""
    it = ControlPlaneProcess()
    task = it.run()
    begun: list[float] = []
    for _ in range(8):
        await it.until("began", len(begun) + 1)
        begun.append(it.clock.monotonic_us() / 1e6)
        it.line.cut = True
        await it.until("cut", len(begun))
        it.line.cut = False
    gaps = [two - one for one, two in pairwise(begun)]
    assert min(gaps[5:]) > 30
    assert max(gaps) < 120
    it.end.set()
    await it.clock.advance(120.0)
    await task


def test_stopping_leader_can_be_cancelled() -> None:
    """After the lead is lost, the service takes 60 s to stop. A cancellation ends it at once and leaves no task."""

    async def main() -> None:
        it = ControlPlaneProcess()

        async def slow() -> None:
            try:
                await it.serve()
            finally:
                try:
                    await it.clock.sleep(60)
                finally:
                    it.seen.append("over")

        task = it.run(slow)
        await it.clock.advance(1.0)
        it.another_process_leads()
        await it.clock.advance(5.0)
        assert it.seen == ["began", "cut"]
        task.cancel()
        await settle()
        assert it.seen == ["began", "cut", "over"]
        assert task.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("errors", "seen"),
    [
        pytest.param(2, ["began"], id="the next renewal succeeds"),
        pytest.param(20, ["began", "cut", "began"], id="no renewal succeeds before the Lease expires"),
    ],
)
async def test_error_in_renewal_keeps_leading_until_expiry(errors: int, seen: list[str]) -> None:
    """The service runs while the lead is certain, and is cancelled before the Lease expires. It restarts afterwards."""
    it = ControlPlaneProcess()
    task = it.run()
    await it.clock.advance(1.0)
    read, broken = it.line.read, [True] * errors

    async def breaks(ref: Ref) -> Json | None:
        if broken:
            broken.pop()
            raise ValueError("no such lease")
        return await read(ref)

    it.line.read = breaks  # type: ignore[method-assign]
    await it.clock.advance(120.0)
    assert it.seen == seen
    it.end.set()
    await it.clock.advance(1.0)
    await asyncio.wait_for(task, 10)
    (lease,) = it.store.kept.values()
    assert not lease["spec"].get("holderIdentity")


async def test_waiting_follower_stops() -> None:
    """It never ran its service."""
    it = ControlPlaneProcess()
    first = it.run()
    await it.clock.advance(1.0)
    other = ControlPlaneProcess()
    other.clock, other.line, other.store = it.clock, it.line, it.store
    second = other.run()
    await it.clock.advance(5.0)
    assert other.seen == []
    other.stop.set()
    await asyncio.wait_for(second, 10)
    assert other.seen == []
    it.end.set()
    await it.clock.advance(1.0)
    await first


async def test_error_of_the_service_is_raised() -> None:
    it = ControlPlaneProcess()

    async def fails() -> None:
        raise ValueError("no such price book")

    task = it.run(fails)
    await it.clock.advance(1.0)
    with pytest.raises(ValueError, match="price book"):
        await task


async def test_followers_are_ready_and_the_leader_is_labelled() -> None:
    """The leader is ready once it serves. A follower is ready while it waits, and has the follower label."""
    it = ControlPlaneProcess(FakeRolePods("one", "two"))
    other = it.other_process("two")
    first = it.run()
    await it.clock.advance(1.0)
    second = other.run()
    await it.clock.advance(1.0)
    assert it.pods is not None
    assert it.pods.roles == {"one": "leader", "two": "follower"}
    assert await other.readiness() == (200, "waits for the lead")
    assert (await it.readiness())[0] == 503  # it does not serve yet
    other.stop.set()
    await second
    assert await other.readiness() == (503, "ends")
    it.end.set()
    await first


async def test_takeover_moves_the_label() -> None:
    """At most one pod has the leader label at any time, even if the old leader was killed and kept its label."""
    it = ControlPlaneProcess(FakeRolePods("one", "two", "three"))
    assert it.pods is not None
    other = it.other_process("two")
    first, second = it.run(), other.run()
    await it.clock.advance(1.0)
    assert it.pods.leaders == ["one"]
    it.line.cut = True
    first.cancel()  # killed: its Lease expires later, its label stays
    await it.clock.advance(5.0)
    assert it.pods.leaders == ["one"]
    await it.clock.advance(30.0)
    assert it.pods.roles == {"one": "follower", "two": "leader", "three": None}
    assert all(list(roles.values()).count("leader") <= 1 for roles in it.pods.history)
    other.end.set()
    await it.clock.advance(1.0)
    await asyncio.gather(first, second, return_exceptions=True)


async def test_lost_lead_clears_the_own_label() -> None:
    """The old leader labels itself as a follower. It is not ready before that."""
    it = ControlPlaneProcess(FakeRolePods("one"))
    assert it.pods is not None
    task = it.run()
    await it.clock.advance(1.0)
    assert it.pods.leaders == ["one"]
    it.pods.away = True
    it.another_process_leads()
    await it.clock.advance(5.0)
    assert it.seen == ["began", "cut"]
    assert await it.readiness() == (503, "waits for its pod's label")
    it.pods.away = False
    await it.clock.advance(5.0)
    assert it.pods.leaders == []
    assert await it.readiness() == (200, "waits for the lead")
    it.stop.set()
    await task


async def test_restarted_container_clears_a_label_that_stayed() -> None:
    """A pod keeps its labels when its container restarts."""
    it = ControlPlaneProcess(FakeRolePods("one", "two"))
    assert it.pods is not None
    first = it.run()
    await it.clock.advance(1.0)
    it.pods.write("two", "leader")
    second = (other := it.other_process("two")).run()
    await it.clock.advance(1.0)
    assert it.pods.roles == {"one": "leader", "two": "follower"}
    for each in (it, other):
        each.stop.set()
        each.end.set()
    await asyncio.gather(first, second)


async def test_label_that_comes_back_is_cleared() -> None:
    """A late write of the old leader, or a person, may set the label. The leader checks every LABEL_POLL_S."""
    it = ControlPlaneProcess(FakeRolePods("one", "two"))
    assert it.pods is not None
    task = it.run()
    await it.clock.advance(1.0)
    it.pods.write("two", "leader")
    it.pods.write("one", "follower")
    await it.clock.advance(LABEL_POLL_S + 1)
    assert it.pods.roles == {"one": "leader", "two": "follower"}
    it.end.set()
    await task


async def test_label_is_retried_until_the_cluster_takes_it() -> None:
    """An unreachable API server does not end the leader. The label is written once the server is back."""
    it = ControlPlaneProcess(FakeRolePods("one"))
    assert it.pods is not None
    it.pods.away = True
    task = it.run()
    await it.clock.advance(60.0)
    assert (it.seen, it.pods.leaders) == (["began"], [])
    it.pods.away = False
    await it.clock.advance(10.0)
    assert it.pods.leaders == ["one"]
    it.end.set()
    await task


async def test_label_write_without_an_answer_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write times out as the row LEASE in `dependencies.py` says, and is repeated."""
    monkeypatch.setattr(dependencies, "LEASE", replace(dependencies.LEASE, timeout_s=0.01))
    pods, clock = FakeRolePods("one"), VirtualClock()
    pods.silent = 1
    following = asyncio.create_task(RoleLabel(pods, "kelvin", "one", clock).follow())
    async with asyncio.timeout(10.0):
        while not following.done():
            await clock.advance(1.0)
            await asyncio.sleep(0.002)
    assert (pods.silent, pods.roles) == (0, {"one": "follower"})
