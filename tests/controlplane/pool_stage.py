"""A cluster in memory with pods that wait, of which a test says what they answer."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec

from contracts.control import Feed
from contracts.errors import Conflict, Refused, Unavailable
from contracts.jobs import Bound, RuntimeReport, RuntimeState, Take
from controlplane.policy.knative_service import Control
from controlplane.policy.placement import PoolSpec, Sharing
from controlplane.policy.pool_service import COST
from controlplane.policy.tenant_space import Needs
from controlplane.scaling.knative.cluster import Ref
from controlplane.scaling.knative.plane import SERVING
from controlplane.scaling.knative.pool_calls import PodCalls
from controlplane.scaling.knative.pool_pods import PodState
from controlplane.scaling.knative.pools import PoolSettings
from tests.controlplane.builders import NOW_S, key, registration, stats
from tests.controlplane.plane_scene import CLUSTER, OURS, Place, Scene, play

SMALL, LARGE = PoolSpec("small", 5000, 2, 8), PoolSpec("large", 50_000, 1, 4)
SETTINGS: Final = PoolSettings((SMALL, LARGE), Sharing(("*/m", "*/n"), frozenset({"secretive"})))
CONTROLLED = replace(CLUSTER, control=Control(url="https://c:7500", snapshotter_url="https://s:7501", secret="inner"))
POOLS = "kelvin--pools"


@dataclass
class Pod:
    """One that a test runs: what it would answer."""

    life: int = 1
    take: Take | None = None
    is_ready: bool = False
    is_deaf: bool = False
    fails: Refused | None = None
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)  # until then it restores
    says: asyncio.Event = field(default_factory=asyncio.Event)  # until then it does not say what it does

    def __post_init__(self) -> None:
        self.says.set()

    def name(self, of: str) -> str:
        return f"{of}-{self.life}"


class Pods(PodCalls):
    """Answers by the rules of `runtime/orders`."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.told: list[tuple[str, str]] = []

    def of(self, url: str) -> Pod:
        pod = self.pods[url]
        if pod.is_deaf:
            raise Refused(Unavailable("the pod"))
        return pod

    async def bind(self, url: str, take: Take) -> Bound:
        pod = self.of(url)
        self.told.append(("bind", url))
        if pod.take not in (None, take):
            raise Refused(Conflict("version", "another one is bound here"))
        pod.take = take
        await pod.goes_on.wait()
        if pod.fails is not None:
            raise pod.fails
        self.of(url).is_ready = True
        return Bound(runtime_id=pod.name(url), max_streams=4, spans=(), bytes_by_tier={})

    async def release(self, url: str, take: Take) -> None:
        pod = self.of(url)
        self.told.append(("release", url))
        if pod.take is not None and pod.take.version != take.version:
            raise Refused(Conflict("version", "another one is bound here"))
        if pod.take is not None:
            pod.take, pod.is_ready, pod.life = None, False, pod.life + 1

    async def state(self, url: str) -> RuntimeReport:
        pod = self.of(url)
        await pod.says.wait()
        state = RuntimeState.STANDBY
        if pod.take is not None:
            state = RuntimeState.READY if pod.is_ready else RuntimeState.RESTORING
        report = RuntimeReport(runtime_id=pod.name(url), pid=1, state=state)
        if (of := pod.take) is None:
            return report
        return msgspec.structs.replace(report, tenant=of.tenant, model=of.model, version=of.version)


class Ground(Place):
    """A cluster with pods of pools, and their namespace."""

    def __init__(self) -> None:
        super().__init__()
        needs = Needs.of(CONTROLLED)
        self.equip("default", needs)
        self.equip("-pools", needs)

    def pool(
        self, name: str, *pods: str, leaving: tuple[str, ...] = (), moved: Mapping[str, str] | None = None
    ) -> None:
        """Its pods, each at an address of its own name's number, or of the name that it `moved` to."""
        service = f"kelvin-pool--{name}"
        about = {"name": f"{service}-x", "namespace": POOLS, "uid": service}
        about["labels"] = {**OURS, "serving.knative.dev/service": service}  # type: ignore[assignment]
        self.put({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": about,
            "ports": [{"name": "http", "port": 8012}] if pods else None,
            "endpoints": [
                {
                    "addresses": [address((moved or {}).get(each, each))],
                    "conditions": {"ready": True, "terminating": each in leaving},
                    "targetRef": {"kind": "Pod", "name": each},
                }
                for each in pods
            ] or None,
        })  # fmt: skip

    def revised(self, name: str) -> None:
        """Knative has a Revision of it."""
        ref = Ref(SERVING, "Service", POOLS, f"kelvin-pool--{name}")
        self.says(ref, "True", latestCreatedRevisionName=f"{name}-00001", latestReadyRevisionName=f"{name}-00001")

    def cost(self, pod: str) -> str:
        """Of its deletion."""
        annotations: dict[str, str] = self.objects[Ref("v1", "Pod", POOLS, pod)]["metadata"]["annotations"]
        return annotations[COST]


def address(pod: str) -> str:
    return f"10.0.{ord(pod[0])}.{ord(pod[-1])}"


def orders(pod: str) -> str:
    return f"https://{address(pod)}:7510"


class Stage:
    """Scene, ground, pods."""

    def __init__(self, scene: Scene, ground: Ground, pods: Pods) -> None:
        self.scene, self.ground, self.pods = scene, ground, pods

    async def run(self, pool: str, *names: str) -> None:
        """These pods wait, and are known to."""
        for each in names:
            self.pods.pods.setdefault(orders(each), Pod())
        self.ground.pool(pool, *names)
        await self.scene.passes(2)

    def pod(self, name: str) -> Pod:
        return self.pods.pods[orders(name)]

    async def ask(self, letter: str = "a", model: str = "m", concurrency: float = 1.0) -> None:
        """An activator reports it."""
        self.scene.plane.observe(stats(key(model, letter), concurrency))
        await self.scene.passes()

    async def register(self, model: str = "m", letter: str = "a", **more: str) -> None:
        await self.scene.registry.register(registration(model, letter, **more), NOW_S)  # type: ignore[arg-type]
        await self.scene.passes()

    def states(self) -> dict[str, PodState]:
        return {pod.name: pod.state for pod in self.scene.pools.pods}

    async def heard(self) -> list[Feed]:
        return await self.scene.heard()


def staged(
    path: Path, scenario: Callable[[Stage], Awaitable[None]], pods: Pods | None = None, devices: int | None = None
) -> None:
    """With pools."""
    ground, calls = Ground(), pods or Pods()

    async def inner(scene: Scene) -> None:
        try:
            await scenario(Stage(scene, ground, calls))
            scene.pools.pods.check_integrity()
        finally:
            for pod in calls.pods.values():
                pod.goes_on.set()

    play(path, inner, ground, settings=SETTINGS, calls=calls, cluster=CONTROLLED, devices=devices)
