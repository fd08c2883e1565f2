"""A control plane on a cluster in memory. The test plays Knative and the parked pods, and reads the feed."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from controlplane.knative.apply.cluster import Json, Ref
from controlplane.knative.knative_controller import KnativeController
from controlplane.knative.policy.knative_service import SERVICE_API, ClusterSpec, ControlEndpoints, service_name
from controlplane.knative.policy.namespace_requirements import NamespaceRequirements, render_namespace
from controlplane.knative.policy.object_labels import TENANT as TENANT_LABEL
from controlplane.knative.policy.pod_placement import PoolingRule, PoolSpec
from controlplane.knative.policy.pool_service import DELETION_COST
from controlplane.knative.pools.pod_client import PodClient
from controlplane.knative.pools.pool_controller import PoolController, PoolSettings
from controlplane.knative.pools.pool_pods import PodState
from controlplane.knative.services.controller_context import ControllerContext
from controlplane.knative.services.pods import PodTable
from controlplane.knative.services.service_renderer import ServiceRenderer
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.registry import Registry
from controlplane.scaling.start_outcomes import StartOutcomes
from controlplane.tasks import Tasks
from kelvin.contracts.artifacts.runtime_control import BindPodRequest, BindResponse, RuntimeReport, RuntimeState
from kelvin.contracts.errors import Conflict, Refused, Unavailable
from kelvin.contracts.serving.control_messages import Feed
from tests.controlplane.builders import BY, NOW_S, TENANT, digest, key, opened_registry, registration, stats
from tests.controlplane.knative.fake_cluster import FakeCluster, running_loop
from tests.controlplane.virtual_time import VirtualClock

CLUSTER = ClusterSpec(image="registry.example/kelvin@sha256:" + "0" * 64, store_url="s3://models/prod")
CLUSTER_WITH_CONTROL = replace(
    CLUSTER, control=ControlEndpoints(url="https://c:7500", snapshotter_url="https://s:7501", secret="inner")
)
NAMESPACE, POOLS = "kelvin-default", "kelvin--pools"
SMALL, LARGE = PoolSpec("small", 5000, 2, 8), PoolSpec("large", 50_000, 1, 4)
SETTINGS: Final = PoolSettings((SMALL, LARGE), PoolingRule(("*/m", "*/n"), frozenset({"secretive"})))
OURS = {"app.kubernetes.io/managed-by": "kelvin"}
OVERLAP_S = 60.0
NO_REQUIREMENTS = NamespaceRequirements()


def at(letter: str, model: str = "m") -> Ref:
    """Return the Service of a version."""
    return Ref(SERVICE_API, "Service", NAMESPACE, service_name(model, digest(letter)))


class FakeKnativeCluster(FakeCluster):
    """A cluster in memory with a namespace for the tenant `default`. The test plays Knative."""

    def __init__(self, *tenants: str) -> None:
        """Create namespaces for these tenants, or for `default`."""
        super().__init__()
        for tenant in tenants or ("default",):
            self.create_namespace(tenant)

    def create_namespace(self, tenant: str, needs: NamespaceRequirements = NO_REQUIREMENTS) -> None:
        """Create a tenant's namespace and secrets, as an operator does."""
        for obj in render_namespace(tenant, needs, "kelvin"):
            if tenant.startswith("-"):  # a namespace of parked pods has no tenant
                obj["metadata"]["labels"].pop(TENANT_LABEL, None)
            self.put({**obj, "metadata": {**obj["metadata"], "uid": obj["metadata"]["name"]}})
        for name in needs.secrets:
            self._put("v1", "Secret", name, namespace=f"kelvin-{tenant}")

    def services(self) -> set[str]:
        """Return the names of all Knative Services."""
        return {ref.name for ref in self.objects if (ref.api_version, ref.kind) == (SERVICE_API, "Service")}

    def set_status(self, ref: Ref, ready: str = "Unknown", **status: str) -> None:
        """Set Knative's status of a Service, observed at its present generation."""
        conditions = [{"type": kind, "status": ready} for kind in ("ConfigurationsReady", "Ready")]
        generation = self.objects[ref]["metadata"].get("generation")
        whole = {"conditions": conditions, "observedGeneration": generation, **status}
        self.put({**self.objects[ref], "status": whole})

    def set_ready(self, letter: str) -> None:
        """Set the version's Service ready, with its first Revision."""
        name = f"{at(letter).name}-00001"
        self.set_status(at(letter), "True", latestCreatedRevisionName=name, latestReadyRevisionName=name)

    def revision(self, letter: str, reason: str | None) -> None:
        """Set the version's first Revision to failed with `reason`, or to ready for None."""
        condition = {"type": "Ready", "status": "True" if reason is None else "False", "reason": reason or ""}
        self._put(SERVICE_API, "Revision", f"{at(letter).name}-00001", status={"conditions": [condition]})

    def pods(self, letter: str, namespace: str = NAMESPACE, model: str = "m", **ready: bool) -> None:
        """Set the pods of a version: each name with its readiness."""
        service = at(letter, model).name
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

    # -- parked pods

    def pool(
        self, name: str, *pods: str, leaving: tuple[str, ...] = (), moved: Mapping[str, str] | None = None
    ) -> None:
        """Set the pods of a pool. Each has the `address` of its name, or of the name that it `moved` to."""
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

    def set_pool_ready(self, name: str) -> None:
        """Set the pool's Service ready, with its first Revision."""
        ref = Ref(SERVICE_API, "Service", POOLS, f"kelvin-pool--{name}")
        self.set_status(ref, "True", latestCreatedRevisionName=f"{name}-00001", latestReadyRevisionName=f"{name}-00001")

    def cost(self, pod: str) -> str:
        """Return the deletion cost of a pod."""
        annotations: dict[str, str] = self.objects[Ref("v1", "Pod", POOLS, pod)]["metadata"]["annotations"]
        return annotations[DELETION_COST]


@dataclass
class Pod:
    """A parked pod, played by the test. `life` counts its processes."""

    life: int = 1
    bind_request: BindPodRequest | None = None
    is_ready: bool = False
    is_unreachable: bool = False
    fails: Refused | None = None
    restore_allowed: asyncio.Event = field(default_factory=asyncio.Event)  # the restore ends once this is set
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)  # `state` answers once this is set

    def __post_init__(self) -> None:
        self.may_answer.set()

    def name(self, of: str) -> str:
        return f"{of}-{self.life}"


class FakePods(PodClient):
    """Pods by the URL of their control API. They answer as `Orders` in `runtime/api/control_api.py` does."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.calls: list[tuple[str, str]] = []

    def of(self, url: str) -> Pod:
        pod = self.pods[url]
        if pod.is_unreachable:
            raise Refused(Unavailable("the pod"))
        return pod

    async def bind(self, url: str, bind_request: BindPodRequest) -> BindResponse:
        pod = self.of(url)
        self.calls.append(("bind", url))
        if pod.bind_request not in (None, bind_request):
            raise Refused(Conflict("version", "another one is bound here"))
        pod.bind_request = bind_request
        await pod.restore_allowed.wait()
        if pod.fails is not None:
            raise pod.fails
        self.of(url).is_ready = True
        return BindResponse(runtime_id=pod.name(url), max_streams=4, spans=(), bytes_by_tier={})

    async def release(self, url: str, bind_request: BindPodRequest) -> None:
        pod = self.of(url)
        self.calls.append(("release", url))
        if pod.bind_request is not None and pod.bind_request.version != bind_request.version:
            raise Refused(Conflict("version", "another one is bound here"))
        if pod.bind_request is not None:
            pod.bind_request, pod.is_ready, pod.life = None, False, pod.life + 1

    async def read_state(self, url: str) -> RuntimeReport:
        pod = self.of(url)
        await pod.may_answer.wait()
        state = RuntimeState.STANDBY
        if pod.bind_request is not None:
            state = RuntimeState.READY if pod.is_ready else RuntimeState.RESTORING
        report = RuntimeReport(runtime_id=pod.name(url), pid=1, state=state)
        if (of := pod.bind_request) is None:
            return report
        return msgspec.structs.replace(report, tenant=of.tenant, model=of.model, version=of.version)


def address(pod: str) -> str:
    return f"10.0.{ord(pod[0])}.{ord(pod[-1])}"


def control_url(pod: str) -> str:
    return f"https://{address(pod)}:7510"


class ControllerScenario:
    """A control plane on a cluster, and the feed as activators receive it. `spec` says how pods are rendered."""

    def __init__(
        self,
        cluster: FakeKnativeCluster,
        registry: Registry,
        feed: FeedHub,
        clock: VirtualClock,
        tasks: Tasks,
        pools: PoolSettings | None = None,
        pods: FakePods | None = None,
        spec: ClusterSpec = CLUSTER,
        devices: int | None = None,
    ) -> None:
        self.cluster, self.registry, self.feed, self.clock = cluster, registry, feed, clock
        self.pods = pods or FakePods()
        self.table = PodTable(clock, "cpu-1", devices)
        self.outcomes = StartOutcomes(registry, feed, tasks)
        rendering = ServiceRenderer(spec, "kelvin", kv_bytes=512 << 20, devices=devices)
        context = ControllerContext(cluster, registry, feed, self.outcomes, self.table, clock)
        self.pools = PoolController(context, pools or PoolSettings(), spec, 512 << 20, self.pods, tasks)
        self.controller = KnativeController(context, rendering, self.pools, OVERLAP_S)
        registry.on_changed = self.controller.tick
        registry.meanwhile = self.controller.find_previous_versions
        self.subscription = feed.subscribe()
        self._feed_reader = self.subscription.__enter__()

    async def read_feed(self) -> list[Feed]:
        """Return the lines of the feed since the last call."""
        lines = []
        while self._feed_reader._lines:
            lines.append(msgspec.json.decode(await self._feed_reader.next_line(), type=Feed))
        return lines

    async def let_pass(self, seconds: float = 0.1) -> None:
        """Advance the time in steps, so that each loop reacts to the others."""
        for _ in range(5):
            await self.clock.advance(seconds / 5)

    async def register(self, letter: str = "a", model: str = "m") -> None:
        """Register a version, as the snapshotter does."""
        await self.registry.register(registration(model, letter), NOW_S)
        await self.let_pass()

    async def deploy(self, letter: str) -> None:
        """Deploy a version: point `prod` to it."""
        await self.registry.deploy(BY, TENANT, "m", digest(letter)[:12], NOW_S)
        await self.let_pass()

    # -- parked pods

    async def park_pods(self, pool: str, *names: str) -> None:
        """Park these pods in a pool, and let the control plane find them."""
        for each in names:
            self.pods.pods.setdefault(control_url(each), Pod())
        self.cluster.pool(pool, *names)
        await self.let_pass(2)

    def pod(self, name: str) -> Pod:
        return self.pods.pods[control_url(name)]

    async def report_load(self, letter: str = "a", model: str = "m", concurrency: float = 1.0) -> None:
        """Report load of a version, as an activator does."""
        self.controller.observe(stats(key(model, letter), concurrency))
        await self.let_pass()

    def states(self) -> dict[str, PodState]:
        return {pod.name: pod.state for pod in self.pools.pods}


@asynccontextmanager
async def create_controller(
    path: Path, cluster: FakeKnativeCluster | None = None, clock: VirtualClock | None = None, **more: Any
) -> AsyncIterator[ControllerScenario]:
    """Yield a control plane on virtual time that does not run yet."""
    feed = FeedHub()
    feed.wait_until_delivered = deliver_at_once  # type: ignore[method-assign]  # no reader has a socket here
    async with opened_registry(path, feed) as registry, Tasks() as tasks:
        yield ControllerScenario(
            cluster or FakeKnativeCluster(), registry, feed, clock or VirtualClock(), tasks, **more
        )


@asynccontextmanager
async def running_controller(
    path: Path, cluster: FakeKnativeCluster | None = None, **more: Any
) -> AsyncIterator[ControllerScenario]:
    """Yield a running control plane that has seen all objects. No watch may be left open."""
    async with create_controller(path, cluster, **more) as it:
        async with running_loop(it.controller):
            await it.let_pass()
            assert it.controller.synced.is_set()
            yield it
        assert it.cluster.open_watches == []


@asynccontextmanager
async def running_pools(
    path: Path, pods: FakePods | None = None, devices: int | None = None
) -> AsyncIterator[ControllerScenario]:
    """Yield a running control plane with the pools of SETTINGS."""
    cluster, needs = FakeKnativeCluster(), NamespaceRequirements.of(CLUSTER_WITH_CONTROL)
    for tenant in ("default", "-pools"):
        cluster.create_namespace(tenant, needs)
    async with running_controller(
        path, cluster, pools=SETTINGS, pods=pods, spec=CLUSTER_WITH_CONTROL, devices=devices
    ) as it:
        try:
            yield it
            it.pools.pods.check_integrity()
        finally:
            for pod in it.pods.pods.values():
                pod.restore_allowed.set()


async def deliver_at_once(revision: int, timeout_s: float) -> bool:
    """Stand in for `FeedHub.wait_until_delivered`, because no reader here has a socket."""
    return True
