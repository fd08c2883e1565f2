"""Versions on a cluster in memory: what is written of them, what is told of what becomes of it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts.control import Feed
from controlplane.facts import ScaleChange
from controlplane.feed import FeedHub
from controlplane.outcomes import Outcomes
from controlplane.policy.knative_service import Cluster, service_name
from controlplane.policy.replica_life import ReplicaState
from controlplane.registry import Registry
from controlplane.scaling.knative.cluster import Invalid, Json, Ref, Upsert
from controlplane.scaling.knative.plane import SERVING, Plane
from controlplane.scaling.knative.pods import PodTable
from controlplane.scaling.knative.pool_actuator import Calls
from controlplane.scaling.knative.pools import Pools, PoolSettings
from controlplane.scaling.knative.wanted import Rendering
from controlplane.tasks import Tasks
from tests.controlplane.builders import BY, NOW_S, TENANT, digest, key, opened_registry, registration
from tests.controlplane.cluster_world import World
from tests.controlplane.no_pods import Nobody
from tests.controlplane.virtual_time import VirtualClock

CLUSTER = Cluster(image="registry.example/kelvin@sha256:" + "0" * 64, store_url="s3://models/prod")
NAMESPACE = "kelvin-default"
OURS = {"app.kubernetes.io/managed-by": "kelvin"}


def at(letter: str, model: str = "m") -> Ref:
    """The version's Service."""
    return Ref(SERVING, "Service", NAMESPACE, service_name(model, digest(letter)))


class Place(World):
    """A cluster in memory that knows namespaces, too, and where a test plays Knative."""

    def _write(self, ref: Ref, obj: Json) -> Json:
        if ref.kind == "Service":
            return super()._write(ref, obj)
        return self.put({**self._new(ref), "metadata": {**self._new(ref)["metadata"], **obj["metadata"]}})

    def services(self) -> set[str]:
        """Names of those that are there."""
        return {ref.name for ref in self.objects if (ref.api_version, ref.kind) == (SERVING, "Service")}

    def says(self, ref: Ref, ready: str = "Unknown", **status: str) -> None:
        """Knative's status of a Service."""
        self.put({**self.objects[ref], "status": {"conditions": [{"type": "Ready", "status": ready}], **status}})

    def becomes_ready(self, letter: str) -> None:
        """Its first revision was."""
        name = f"{at(letter).name}-00001"
        self.says(at(letter), "True", latestCreatedRevisionName=name, latestReadyRevisionName=name)

    def revision(self, letter: str, reason: str | None) -> None:
        """It has failed, or not."""
        condition = {"type": "Ready", "status": "True" if reason is None else "False", "reason": reason or ""}
        self._put(SERVING, "Revision", f"{at(letter).name}-00001", status={"conditions": [condition]})

    def pods(self, letter: str, **ready: bool) -> None:
        """By their names, and whether they are ready."""
        service = at(letter).name
        endpoints = [
            {"addresses": ["10.0.0.1"], "conditions": {"ready": is_so}, "targetRef": {"kind": "Pod", "name": name}}
            for name, is_so in ready.items()
        ]
        self._put(
            "discovery.k8s.io/v1", "EndpointSlice", f"{service}-00001-private-x",
            {"serving.knative.dev/service": service},
            ports=[{"name": "http", "port": 8012}] if endpoints else None, endpoints=endpoints or None,
        )  # fmt: skip

    def _put(self, api_version: str, kind: str, name: str, labels: Json | None = None, **more: Any) -> None:
        about = {"name": name, "namespace": NAMESPACE, "labels": {**OURS, **(labels or {})}, "uid": name}
        self.put({"apiVersion": api_version, "kind": kind, "metadata": about, **more})


class Scene:
    """What a control plane on a cluster has, and what activators have heard of it."""

    def __init__(
        self,
        place: Place,
        registry: Registry,
        feed: FeedHub,
        clock: VirtualClock,
        tasks: Tasks,
        settings: PoolSettings | None = None,
        calls: Calls | None = None,
        cluster: Cluster = CLUSTER,
    ) -> None:
        self.place, self.registry, self.feed, self.clock = place, registry, feed, clock
        self.table = PodTable(clock, "cpu-1")
        self.outcomes = Outcomes(registry, tasks)
        rendering = Rendering(cluster, "kelvin", kv_bytes=512 << 20)
        self.pools = Pools(
            place, settings or PoolSettings(), cluster, 512 << 20, calls or Nobody(),
            registry, feed, self.outcomes, self.table, clock, tasks,
        )  # fmt: skip
        self.plane = Plane(
            place, registry, feed, self.outcomes, self.table, rendering, clock, feed.is_suspended, self.pools
        )
        registry.on_changed = self.plane.tick
        self.subscription = feed.subscribe()
        self._heard = self.subscription.__enter__()

    async def heard(self) -> list[Feed]:
        """Lines since the last look."""
        lines = []
        while self._heard._lines:
            lines.append(msgspec.json.decode(await self._heard.take(), type=Feed))
        return lines

    async def passes(self, seconds: float = 0.1) -> None:
        """Until everybody has done what there is to do."""
        for _ in range(5):
            await self.clock.advance(seconds / 5)

    async def register(self, letter: str) -> None:
        """As the snapshotter does."""
        await self.registry.register(registration("m", letter), NOW_S)
        await self.passes()

    async def deploy(self, letter: str) -> None:
        """`prod` names it."""
        await self.registry.deploy(BY, TENANT, "m", digest(letter)[:12], NOW_S)
        await self.passes()


@asynccontextmanager
async def running(plane: Plane) -> AsyncIterator[None]:
    """It runs until the block ends."""
    task = asyncio.create_task(plane.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def play(path: Path, scenario: Callable[[Scene], Awaitable[None]], place: Place | None = None, **more: Any) -> None:
    """On a clock that moves when told to. Nothing is left open."""
    place = place or Place()

    async def main() -> None:
        clock, feed = VirtualClock(), FeedHub()
        async with opened_registry(path, feed) as registry, Tasks() as tasks:
            scene = Scene(place, registry, feed, clock, tasks, **more)
            feed.settled = _at_once  # type: ignore[method-assign]  # nobody reads on a socket here
            async with running(scene.plane):
                await scene.passes()
                assert scene.plane.synced.is_set()
                await scenario(scene)
        assert place.watching == []

    asyncio.run(main())


async def _at_once(revision: int, timeout_s: float) -> bool:
    return True


def test_from_a_registration_to_its_deletion(tmp_path: Path) -> None:
    """A Service as rendered, in a namespace of its tenant; where it is heard of; its pods; nothing that stays."""

    async def scenario(it: Scene) -> None:
        await it.register("a")
        assert it.place.services() == {at("a").name}
        assert Ref("v1", "Namespace", None, NAMESPACE) in it.place.objects
        await it.heard()
        it.place.becomes_ready("a")
        it.place.pods("a", one=False)
        await it.passes()
        lines = await it.heard()
        assert [row.name for line in lines for row in line.revisions] == [f"{at('a').name}-00001"]
        assert [(row.runtime_id, row.unproven) for line in lines for row in line.replicas] == [("one", True)]
        assert (it.table.ready(key()), it.table.live(key())) == (0, 1)
        it.place.pods("a", one=True, two=True)
        await it.passes()
        assert it.table.ready(key()) == 2
        assert {pod.runtime_id for pod in it.table} == {"one", "two"}
        assert it.outcomes.last(key()) is not None
        it.place.pods("a", two=True)
        await it.passes()
        assert [name for line in await it.heard() for name in line.removed_replicas] == ["one"]
        await it.registry.delete_model(BY, TENANT, "m", NOW_S, it.table.is_present, force=True)
        await it.passes()
        assert it.place.services() == set()
        snapshot = it.feed.snapshot()
        assert (snapshot.revisions, snapshot.replicas, len(tuple(it.table))) == ((), (), 0)

    play(tmp_path, scenario)


def test_another_version(tmp_path: Path) -> None:
    """What was named before keeps its Service until the new one was ready; deployed back meanwhile it stays."""

    async def scenario(it: Scene) -> None:
        await it.register("a")
        await it.register("b")
        assert it.place.services() == {at("a").name}, "nothing names the second one"
        it.place.becomes_ready("a")
        await it.deploy("b")
        assert it.place.services() == {at("a").name, at("b").name}
        it.place.says(at("b"), latestCreatedRevisionName="x-00001")
        await it.passes()
        assert it.place.services() == {at("a").name, at("b").name}
        it.place.becomes_ready("b")
        await it.passes()
        assert it.place.services() == {at("b").name}

    play(tmp_path, scenario)


def test_scale_is_written(tmp_path: Path) -> None:
    """A change of how a model scales is one of its Service, at once."""

    async def scenario(it: Scene) -> None:
        await it.register("a")
        await it.registry.rescale(BY, TENANT, "m", ScaleChange(min=1, max=4), NOW_S)
        await it.passes()
        notes = it.place.objects[at("a")]["spec"]["template"]["metadata"]["annotations"]
        assert notes["autoscaling.knative.dev/max-scale"] == "4"
        assert notes["autoscaling.knative.dev/min-scale"] == "1"

    play(tmp_path, scenario)


def test_a_start_that_fails(tmp_path: Path) -> None:
    """Who waits is told once, in a sentence of ours; an operator sees the last one; a pod that is ready ends it."""

    async def scenario(it: Scene) -> None:
        await it.register("a")
        it.place.says(at("a"), latestCreatedRevisionName=f"{at('a').name}-00001")
        await it.passes()
        await it.heard()
        for _ in range(3):
            it.place.revision("a", "ImagePullBackOff")
            it.place.resync()
            await it.passes()
        told = [row for line in await it.heard() for row in line.failures]
        assert [(row.code, row.status, row.retryable) for row in told] == [("start_failed", 503, True)]
        assert told[0].message == "no replica could be started: its image is not to be had"
        last = it.outcomes.last(key())
        assert last is not None
        assert last.failure is not None
        assert last.failure[0] == "start_failed"
        it.place.revision("a", None)
        it.place.becomes_ready("a")
        it.place.pods("a", one=True)
        await it.passes()
        last = it.outcomes.last(key())
        assert last is not None
        assert last.failure is None

    play(tmp_path, scenario)


def test_a_service_that_is_refused(tmp_path: Path) -> None:
    """The cluster takes no such object: waiters are told, once, and it is tried again."""

    async def scenario(it: Scene) -> None:
        it.place.refuse[at("a")] = deque([Invalid("admission webhook denied the request: /etc/secret")] * 6)
        await it.register("a")
        for _ in range(5):
            await it.passes(2.0)
        told = [row for line in await it.heard() for row in line.failures]
        assert [row.message for row in told] == ["no replica could be started: the cluster does not take its Service"]
        assert it.plane.refusals()["Invalid"] == 1
        await it.passes(400.0)
        assert it.place.services() == {at("a").name}
        assert it.plane.refusals()["Invalid"] == 0

    play(tmp_path, scenario)


def test_a_watch_that_missed_something(tmp_path: Path) -> None:
    """What is gone when it begins again is told to be gone."""

    async def scenario(it: Scene) -> None:
        await it.register("a")
        it.place.becomes_ready("a")
        it.place.pods("a", one=True)
        await it.passes()
        for ref in [ref for ref in it.place.objects if ref.kind == "EndpointSlice"]:
            del it.place.objects[ref]
        await it.heard()
        it.place.resync()
        await it.passes()
        assert [name for line in await it.heard() for name in line.removed_replicas] == ["one"]

    play(tmp_path, scenario)


def test_an_edit_behind_its_back(tmp_path: Path) -> None:
    """It is written over, as is a deletion."""

    async def scenario(it: Scene) -> None:
        await it.register("a")
        path = ("spec", "template", "spec", "containers", 0, "image")
        it.place.edit(at("a"), path, "somebody/elses:1")
        await it.passes(5.0)
        assert it.place.objects[at("a")]["spec"]["template"]["spec"]["containers"][0]["image"] == CLUSTER.image
        it.place.remove(at("a"))
        await it.passes(10.0)
        assert it.place.services() == {at("a").name}

    play(tmp_path, scenario)


def test_another_control_plane_goes_on(tmp_path: Path) -> None:
    """Its first snapshot has what runs; what changed while there was none is made up for, and the old one is kept."""

    async def main() -> None:
        place, clock = Place(), VirtualClock()
        for turn in range(2):
            feed = FeedHub()
            async with opened_registry(tmp_path, feed) as registry, Tasks() as tasks:
                scene = Scene(place, registry, feed, clock, tasks)
                feed.settled = _at_once  # type: ignore[method-assign]
                if turn == 0:
                    async with running(scene.plane):
                        await scene.register("a")
                        place.becomes_ready("a")
                        place.pods("a", one=True)
                        await scene.passes()
                    await scene.register("b")  # nobody writes: it was cut before
                    await scene.deploy("b")
                    assert place.services() == {at("a").name}
                    continue
                async with running(scene.plane):
                    await asyncio.wait_for(scene.plane.synced.wait(), 10)
                    assert [row.runtime_id for row in feed.snapshot().replicas] == ["one"]
                    await scene.passes()
                    assert place.services() == {at("a").name, at("b").name}
                    assert scene.table.of(key())[0].state is ReplicaState.READY

    asyncio.run(main())


def test_it_leads_a_second_time(tmp_path: Path) -> None:
    """What it knew and wanted before is nothing by then: what went meanwhile is told to be gone, what was to be there
    then is not written, and until all is seen it says that it is not.
    """

    async def main() -> None:
        place, clock, feed = Place(), VirtualClock(), FeedHub()
        async with opened_registry(tmp_path, feed) as registry, Tasks() as tasks:
            scene = Scene(place, registry, feed, clock, tasks)
            feed.settled = _at_once  # type: ignore[method-assign]
            async with running(scene.plane):
                await scene.register("a")
                place.becomes_ready("a")
                place.pods("a", one=True)
                await scene.passes()
                assert [row.runtime_id for row in feed.snapshot().replicas] == ["one"]
            await registry.delete_model(BY, TENANT, "m", NOW_S, scene.table.is_present, force=True)
            place.objects.clear()
            place.calls.clear()
            place.told.clear()
            async with running(scene.plane):
                await scene.passes()
                assert not scene.plane.synced.is_set()
                place.told.set()
                await scene.passes(10.0)
                assert scene.plane.synced.is_set()
                assert place.calls == []
                snapshot = feed.snapshot()
                assert (snapshot.revisions, snapshot.replicas, len(tuple(scene.table))) == ((), (), 0)

    asyncio.run(main())


def test_a_defect_leaves_no_watch_open(tmp_path: Path) -> None:
    """Neither its own nor those beside it."""

    async def main() -> None:
        place, clock, feed = Place(), VirtualClock(), FeedHub()
        async with opened_registry(tmp_path, feed) as registry, Tasks() as tasks:
            scene = Scene(place, registry, feed, clock, tasks)
            running = asyncio.create_task(scene.plane.run())
            await scene.passes()
            assert len(place.watching) == 5
            for _, changes in place.watching[-1:]:
                changes.put_nowait(Upsert({"apiVersion": "v1", "metadata": {}}))
            with pytest.raises(ExceptionGroup) as raised:
                await running
            assert raised.group_contains(KeyError)
            assert place.watching == []

    asyncio.run(main())
