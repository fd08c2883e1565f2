"""The versions of an installation run as Knative Services: they are written and watched here, and Knative decides."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final

from contracts.settings import BadSetting
from contracts.usage import RequestRecord
from controlplane import cluster_api
from controlplane.answers import ModelStatus, ProcessStatus, Status
from controlplane.changing import Changes
from controlplane.clock import Clock
from controlplane.cluster_settings import SCALING, ClusterSettings
from controlplane.installation import Installation
from controlplane.jobs import jobs_beside
from controlplane.meters import show_pending
from controlplane.outcomes import Outcomes
from controlplane.policy.knative_service import namespace_of
from controlplane.policy.replica_life import ReplicaState
from controlplane.running import Running
from controlplane.scaling.knative.cluster import ClusterApi, ClusterError
from controlplane.scaling.knative.declarations import Declarations
from controlplane.scaling.knative.declared_stores import DeclaredModels, DeclaredTenants
from controlplane.scaling.knative.plane import Plane
from controlplane.scaling.knative.pods import PodTable
from controlplane.scaling.knative.pool_calls import PodCalls
from controlplane.scaling.knative.pools import Pools
from controlplane.scaling.knative.role_label import RoleLabel
from controlplane.scaling.knative.wanted import Rendering
from controlplane.status import pending_replicas, pod_pools
from service.first import first
from service.way import Ways
from telemetry.policy.instruments import Kind, by

if TYPE_CHECKING:
    from controlplane.scaling.knative.client import KubernetesCluster

log = logging.getLogger(__name__)

REASONS: Final = ("Busy", "Conflict", "Denied", "Differs", "Foreign", "Invalid", "Missing", "Unreachable")
BEHIND: Final = ("failed", "refused", "starting", "unreadable", "waiting")
STATES: Final = (ReplicaState.RESTORING, ReplicaState.READY, ReplicaState.DRAINING)


@asynccontextmanager
async def connected(settings: ClusterSettings, clock: Clock) -> "AsyncIterator[KubernetesCluster]":
    """The cluster, until the block is left; whether it answers is not asked. Raises BadSetting."""
    try:
        from controlplane.scaling.knative import client  # an extra, which no other installation has to have
    except ImportError as error:
        raise BadSetting(SCALING, "knative", "needs the extra `cluster`") from error
    load = client.in_cluster() if settings.kubeconfig is None else client.kubeconfig(settings.kubeconfig)
    async with AsyncExitStack() as ladder:
        try:
            cluster = await ladder.enter_async_context(client.opened(load, clock))
        except ClusterError as error:
            raise BadSetting(SCALING, "knative", f"no cluster to speak to: {error.trouble.message}") from error
        yield cluster


def role_label(settings: ClusterSettings, cluster: "KubernetesCluster", clock: Clock) -> RoleLabel | None:
    """Return the role label of this process's pod; None where it is in none that is known."""
    return None if settings.pod is None else RoleLabel(cluster, settings.namespace, settings.pod, clock)


async def on_cluster(
    ladder: AsyncExitStack,
    inst: Installation,
    settings: ClusterSettings,
    api: ClusterApi,
    ways: Ways,
    stop: asyncio.Event,
) -> Running:
    """Put the cluster's parts together. On return the feed has what runs already, unless `stop` is set."""
    jobs = await jobs_beside(ladder, inst)
    pods = PodTable(inst.clock, settings.pods.device_class or f"cpu-{settings.pods.cores}", settings.own_devices)
    page = inst.telemetry.page
    page.read(
        "kelvin_replicas", "Pods by state.", Kind.GAUGE, ("state",),
        lambda: by((str(state), sum(pod.state is state for pod in pods)) for state in STATES),
    )  # fmt: skip
    outcomes = Outcomes(inst.registry, inst.feed, inst.tasks)
    rendering = Rendering(settings.pods, settings.namespace, inst.settings.kv_bytes, settings.own_devices)
    pools = Pools(
        api, settings.pools, settings.pods, inst.settings.kv_bytes, PodCalls(ways),
        inst.registry, inst.feed, outcomes, pods, inst.clock, inst.tasks,
    )  # fmt: skip
    page.read("kelvin_pool_pods", "Pods that wait or serve, by state.", Kind.GAUGE, ("pool", "state"), pools.counts)

    def has_no_minimum(tenant: str) -> bool:
        return inst.feed.is_suspended(tenant) or inst.feed.is_spent(tenant)

    plane = Plane(
        api, inst.registry, inst.feed, outcomes, pods, rendering, inst.clock, has_no_minimum, pools,
        settings.overlap_s,
    )  # fmt: skip
    show_pending(
        page,
        lambda: {(row.node.device, row.node.zone, row.node.spot): row.replicas for row in plane.nodes.pending()},
    )
    page.read(
        "kelvin_cluster_refused_objects", "What the cluster does not take or keep as it is wanted.", Kind.GAUGE,
        ("reason",), lambda: by((reason, found[reason]) for found in (plane.refusals(),) for reason in REASONS),
    )  # fmt: skip
    page.read(
        "kelvin_cluster_versions_behind", "Versions that run the image, or other settings of Kelvin's own, of before.",
        Kind.GAUGE, ("reason",),
        lambda: by((reason, sum(each.reason == reason for each in outcomes.behind.values())) for reason in BEHIND),
    )  # fmt: skip
    inst.registry.on_changed = plane.tick
    inst.registry.meanwhile = plane.meanwhile
    tenants = inst.access.tenants
    changes = Changes(inst.registry, tenants, inst.access.keys, pods, plane, inst.clock)
    declared = Declarations(
        api,
        DeclaredModels(changes),
        DeclaredTenants(changes),
        inst.clock,
        lambda tenant: namespace_of(tenant, settings.pods),
        settings.namespace,
    )
    inst.tasks.start_loop("cluster", plane.run)
    inst.tasks.start_loop("declarations", declared.run)
    await first(plane.synced.wait(), stop.wait())

    async def ready() -> bool:
        return plane.synced.is_set()

    async def status(models: tuple[ModelStatus, ...]) -> Status:
        here = ProcessStatus(name="controlplane", healthy=True, ready=await ready())
        now_s = inst.clock.wall_s()
        pending = tuple(pending_replicas(row, now_s) for row in plane.nodes.pending())
        return Status(
            processes=(here,), cache=None, device=None, models=models, pending=pending, pools=pod_pools(pools.counts())
        )

    router = cluster_api.router(inst.telemetry)
    # A pod may live more than once, under names of its own (`runtime`): the ledger hears of them from itself.
    return Running(pods, outcomes, plane, jobs, ready, status, _unheard, None, (router,), plane.obstacle)


def _unheard(records: tuple[RequestRecord, ...]) -> None:
    """Do nothing: on a cluster no time to the first token is foretold, so none is learned."""
