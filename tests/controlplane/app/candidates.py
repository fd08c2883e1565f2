"""Candidates for leadership. Each has its own clock and connection to the Lease, which may be cut, slow or lossy."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from typing import Any

from controlplane.app.leader_election import LeaderElection
from controlplane.app.role_label import LEADER
from controlplane.knative.apply.cluster import ClusterError, Json, Ref, Unreachable, WriteConflict
from controlplane.knative.apply.kubernetes_client import KubernetesCluster
from controlplane.knative.policy.object_labels import ROLE
from tests.controlplane.virtual_time import VirtualClock

NAMES = ("a", "b", "c")


class FakeLeaseStore:
    """Leases, as an API server stores them."""

    def __init__(self) -> None:
        self.kept: dict[Ref, Json] = {}
        self.writes = 0

    def write(self, obj: Json, *, new: bool) -> Json:
        ref = Ref.of(obj)
        held = self.kept.get(ref)
        if new is (held is not None) or (
            held and held["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]
        ):
            raise ClusterError(WriteConflict("stale"))
        self.writes += 1
        obj = deepcopy(obj)
        obj["metadata"]["resourceVersion"] = str(self.writes)
        self.kept[ref] = obj
        return deepcopy(obj)


class LeaseConnection:
    """One candidate's connection to the store. It can be cut, slow, or lose answers (`loses_answers`)."""

    def __init__(self, store: FakeLeaseStore, clock: VirtualClock) -> None:
        self.store, self.clock = store, clock
        self.cut = self.loses_answers = False
        self.delay_s = 0.0

    async def _call(self, act: Any) -> Any:
        if self.delay_s:
            await self.clock.sleep(self.delay_s)
        if self.cut:
            await self.clock.sleep(4.0)  # its deadline
            raise ClusterError(Unreachable("cut"))
        answer = act()
        if self.loses_answers:
            await self.clock.sleep(4.0)
            raise ClusterError(Unreachable("no answer"))
        return answer

    async def read(self, ref: Ref) -> Json | None:
        found: Json | None = await self._call(lambda: deepcopy(self.store.kept.get(ref)))
        return found

    async def create(self, obj: Json) -> Json:
        made: Json = await self._call(lambda: self.store.write(obj, new=True))
        return made

    async def replace(self, obj: Json) -> Json:
        made: Json = await self._call(lambda: self.store.write(obj, new=False))
        return made


class FakeRolePods(KubernetesCluster):
    """The role labels of control-plane pods by name, and the history of all labels. `away` makes the API server
    unreachable. The next `silent` writes get no answer.
    """

    def __init__(self, *names: str) -> None:
        self.roles: dict[str, str | None] = dict.fromkeys(names)
        self.away = False
        self.silent = 0
        self.history: list[dict[str, str | None]] = []

    async def list_pods(self, namespace: str, labels: str) -> tuple[Json, ...]:
        self._check()
        name, _, value = labels.partition("=")
        assert (namespace, name) == ("kelvin", ROLE)
        return tuple({"metadata": {"name": pod, "uid": pod}} for pod, role in self.roles.items() if role == value)

    async def apply(self, obj: Json) -> Json:
        self._check()
        if self.silent:
            self.silent -= 1
            await asyncio.Event().wait()
        about = obj["metadata"]
        assert about["namespace"] == "kelvin"
        if about["name"] not in self.roles or about.get("uid", about["name"]) != about["name"]:
            raise ClusterError(WriteConflict("no such pod"))
        self.write(about["name"], about["labels"][ROLE])
        return obj

    def write(self, pod: str, role: str) -> None:
        """Set a pod's role label, as any client can."""
        self.roles[pod] = role
        self.history.append(dict(self.roles))

    @property
    def leaders(self) -> list[str]:
        """The pods that the Service selects."""
        return [pod for pod, role in self.roles.items() if role == LEADER]

    def _check(self) -> None:
        if self.away:
            raise ClusterError(Unreachable("no answer"))


class SkewedClock(VirtualClock):
    """The clock of another machine, with another time of day and another zero."""

    def __init__(self, true: VirtualClock, offset_s: float) -> None:
        self.true, self.offset_s = true, offset_s

    def monotonic_us(self) -> int:
        return self.true.monotonic_us() + int(self.offset_s * 1e6)

    def wall_s(self) -> int:
        return self.true.wall_s() - int(self.offset_s * 77)

    async def sleep(self, seconds: float) -> None:
        await self.true.sleep(seconds)


class LeaderCandidates:
    """Several candidates. `working` names the one that does the leader's work."""

    def __init__(self) -> None:
        self.clock, self.store = VirtualClock(), FakeLeaseStore()
        self.lines = {name: LeaseConnection(self.store, self.clock) for name in NAMES}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.elections: dict[str, LeaderElection] = {}
        self.working: list[str] = []
        self.history: list[str] = []

    def start(self, name: str) -> None:
        if name in self.tasks and not self.tasks[name].done():
            return
        clock = SkewedClock(self.clock, 1000.0 * NAMES.index(name))
        me = f"{name}-{len(self.history)}"
        self.elections[name] = LeaderElection(self.lines[name], "kelvin", "leader", me, clock, jitter=lambda: 0.5)
        self.tasks[name] = asyncio.create_task(stand(self.elections[name], lambda: self.work(name)))

    async def work(self, name: str) -> None:
        assert self.working == [], f"{name} and {self.working} lead"
        self.working.append(name)
        self.history.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            self.working.remove(name)

    async def stop(self, name: str) -> None:
        task = self.tasks.pop(name, None)
        if task is None:
            return
        task.cancel()
        for _ in range(20):
            await self.advance(1.0)
            if task.done():
                break
        with suppress(asyncio.CancelledError):
            await task

    async def advance(self, seconds: float) -> None:
        for _ in range(max(1, int(seconds / 0.5))):
            await self.clock.advance(0.5)
            assert len([each for each in self.elections.values() if each.leading]) <= 1
            for task in self.tasks.values():
                if task.done():
                    task.result()

    async def end(self) -> None:
        for name in list(self.tasks):
            await self.stop(name)


async def stand(election: LeaderElection, work: Callable[[], Awaitable[None]]) -> None:
    """Stand for election until the work has ended."""
    is_over = False
    while not is_over:
        await election.win()
        is_over = await election.lead(work)


@asynccontextmanager
async def open_candidates() -> AsyncIterator[LeaderCandidates]:
    """Yield the candidates, and stop all of them at the end."""
    it = LeaderCandidates()
    yield it
    await it.end()
    assert it.working == []
