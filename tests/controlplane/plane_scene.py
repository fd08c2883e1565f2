"""A control plane over a cluster in memory, where a test plays Knative, and what activators hear of it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from contracts.control import Feed
from controlplane.feed import FeedHub
from controlplane.outcomes import Outcomes
from controlplane.policy.knative_service import Cluster, service_name
from controlplane.policy.labels import TENANT as TENANT_LABEL
from controlplane.policy.tenant_space import Needs, render_namespace
from controlplane.registry import Registry
from controlplane.scaling.knative.cluster import Json, Ref
from controlplane.scaling.knative.plane import SERVING, Plane
from controlplane.scaling.knative.pods import PodTable
from controlplane.scaling.knative.pool_calls import PodCalls
from controlplane.scaling.knative.pools import Pools, PoolSettings
from controlplane.scaling.knative.wanted import Rendering
from controlplane.tasks import Tasks
from tests.controlplane.builders import BY, NOW_S, TENANT, digest, opened_registry, registration
from tests.controlplane.cluster_world import World, running
from tests.controlplane.no_pods import Nobody
from tests.controlplane.virtual_time import VirtualClock

CLUSTER = Cluster(image="registry.example/kelvin@sha256:" + "0" * 64, store_url="s3://models/prod")
NAMESPACE = "kelvin-default"
OURS = {"app.kubernetes.io/managed-by": "kelvin"}


def at(letter: str, model: str = "m") -> Ref:
    """The version's Service."""
    return Ref(SERVING, "Service", NAMESPACE, service_name(model, digest(letter)))


OVERLAP_S = 60.0
BARE = Needs()


class Place(World):
    """A cluster in memory whose tenant `default` has its namespace, and where a test plays Knative."""

    def __init__(self, *tenants: str) -> None:
        """With the namespaces of these tenants; without any that of `default`."""
        super().__init__()
        for tenant in tenants or ("default",):
            self.equip(tenant)

    def _write(self, ref: Ref, obj: Json) -> Json:
        if ref.kind == "Service":
            return super()._write(ref, obj)
        return self.put({**self._new(ref), "metadata": {**self._new(ref)["metadata"], **obj["metadata"]}})

    def equip(self, tenant: str, needs: Needs = BARE) -> None:
        """As an operator does."""
        for obj in render_namespace(tenant, needs, "kelvin"):
            if tenant.startswith("-"):  # of pods that wait: no tenant's
                obj["metadata"]["labels"].pop(TENANT_LABEL, None)
            self.put({**obj, "metadata": {**obj["metadata"], "uid": obj["metadata"]["name"]}})
        for name in needs.secrets:
            self._put("v1", "Secret", name, namespace=f"kelvin-{tenant}")

    def services(self) -> set[str]:
        """Names of those that are there."""
        return {ref.name for ref in self.objects if (ref.api_version, ref.kind) == (SERVING, "Service")}

    def says(self, ref: Ref, ready: str = "Unknown", **status: str) -> None:
        """Knative's status of a Service, as of what is written now."""
        conditions = [{"type": kind, "status": ready} for kind in ("ConfigurationsReady", "Ready")]
        generation = self.objects[ref]["metadata"].get("generation")
        whole = {"conditions": conditions, "observedGeneration": generation, **status}
        self.put({**self.objects[ref], "status": whole})

    def becomes_ready(self, letter: str) -> None:
        """Its first revision was."""
        name = f"{at(letter).name}-00001"
        self.says(at(letter), "True", latestCreatedRevisionName=name, latestReadyRevisionName=name)

    def revision(self, letter: str, reason: str | None) -> None:
        """It has failed, or not."""
        condition = {"type": "Ready", "status": "True" if reason is None else "False", "reason": reason or ""}
        self._put(SERVING, "Revision", f"{at(letter).name}-00001", status={"conditions": [condition]})

    def pods(self, letter: str, namespace: str = NAMESPACE, **ready: bool) -> None:
        """By their names, and whether they are ready."""
        service = at(letter).name
        endpoints = [
            {"addresses": ["10.0.0.1"], "conditions": {"ready": is_so}, "targetRef": {"kind": "Pod", "name": name}}
            for name, is_so in ready.items()
        ]
        self._put(
            "discovery.k8s.io/v1", "EndpointSlice", f"{service}-00001-private-x",
            {"serving.knative.dev/service": service}, namespace,
            ports=[{"name": "http", "port": 8012}] if endpoints else None, endpoints=endpoints or None,
        )  # fmt: skip

    def _put(
        self,
        api_version: str,
        kind: str,
        name: str,
        labels: Json | None = None,
        namespace: str = NAMESPACE,
        **more: Any,
    ) -> None:
        about = {"name": name, "namespace": namespace, "labels": {**OURS, **(labels or {})}, "uid": name}
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
        calls: PodCalls | None = None,
        cluster: Cluster = CLUSTER,
        devices: int | None = None,
    ) -> None:
        self.place, self.registry, self.feed, self.clock = place, registry, feed, clock
        self.table = PodTable(clock, "cpu-1", devices)
        self.outcomes = Outcomes(registry, feed, tasks)
        rendering = Rendering(cluster, "kelvin", kv_bytes=512 << 20, devices=devices)
        self.pools = Pools(
            place, settings or PoolSettings(), cluster, 512 << 20, calls or Nobody(),
            registry, feed, self.outcomes, self.table, clock, tasks,
        )  # fmt: skip
        self.plane = Plane(
            place, registry, feed, self.outcomes, self.table, rendering, clock,
            lambda tenant: feed.is_suspended(tenant) or feed.is_spent(tenant), self.pools, OVERLAP_S,
        )  # fmt: skip
        registry.on_changed = self.plane.tick
        registry.meanwhile = self.plane.meanwhile
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


def play(path: Path, scenario: Callable[[Scene], Awaitable[None]], place: Place | None = None, **more: Any) -> None:
    """On a clock that moves when told to. Nothing is left open."""
    place = place or Place()

    async def main() -> None:
        clock, feed = VirtualClock(), FeedHub()
        async with opened_registry(path, feed) as registry, Tasks() as tasks:
            scene = Scene(place, registry, feed, clock, tasks, **more)
            feed.settled = at_once  # type: ignore[method-assign]  # nobody reads on a socket here
            async with running(scene.plane):
                await scene.passes()
                assert scene.plane.synced.is_set()
                await scenario(scene)
        assert place.watching == []

    asyncio.run(main())


async def at_once(revision: int, timeout_s: float) -> bool:
    """As `FeedHub.settled`, where nobody reads."""
    return True
