"""Build the backend of a cluster: versions run as Knative Services, written and watched here. Knative scales them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final

from controlplane.api import cluster_api
from controlplane.api.types.admin_types import ModelStatus, ProcessStatus, Status
from controlplane.app.control_plane_services import ControlPlaneServices
from controlplane.app.push_jobs import build_zygote_push_jobs
from controlplane.app.role_label import RoleLabel
from controlplane.clock import Clock
from controlplane.knative.apply.cluster import ClusterApi, ClusterError
from controlplane.knative.cluster_settings import SCALING, ClusterSettings
from controlplane.knative.custom_resource_controller import CustomResourceController
from controlplane.knative.custom_resource_stores import ModelResourceStore, TenantResourceStore
from controlplane.knative.knative_controller import KnativeController
from controlplane.knative.policy.knative_service import namespace_of
from controlplane.knative.policy.pool_service import device_class_of
from controlplane.knative.pools.pod_client import PodClient
from controlplane.knative.pools.pool_controller import PoolController
from controlplane.knative.services.controller_context import ControllerContext
from controlplane.knative.services.pods import PodTable
from controlplane.knative.services.service_renderer import ServiceRenderer
from controlplane.scaling.admin_operations import AdminOperations
from controlplane.scaling.interfaces import ReplicaBackend
from controlplane.scaling.local.metrics import register_pending_metric
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.start_outcomes import StartOutcomes
from controlplane.status.model_status import pending_replicas, pod_pools
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.setting_parser import BadSetting
from kelvin.ipc.connector import ConnectorFactory
from kelvin.process.race import first_completed
from kelvin.telemetry.policy.instruments import MetricKind, MetricsPage, series_by_label

if TYPE_CHECKING:
    from controlplane.knative.apply.kubernetes_client import KubernetesCluster

log = logging.getLogger(__name__)

REASONS: Final = ("Busy", "Conflict", "Denied", "Differs", "Foreign", "Invalid", "Missing", "Unreachable")
BEHIND_REASONS: Final = ("failed", "refused", "starting", "unreadable", "waiting")
STATES: Final = (ReplicaState.RESTORING, ReplicaState.READY, ReplicaState.DRAINING)


@asynccontextmanager
async def connect_cluster(settings: ClusterSettings, clock: Clock) -> "AsyncIterator[KubernetesCluster]":
    """Connect to the cluster until the block is left. Does not check that the cluster answers. Raises BadSetting."""
    try:
        from controlplane.knative.apply import kubernetes_client  # needs the extra `cluster`
    except ImportError as error:
        raise BadSetting(SCALING, "knative", "needs the extra `cluster`") from error
    load = (
        kubernetes_client.service_account_loader()
        if settings.kubeconfig is None
        else kubernetes_client.kubeconfig(settings.kubeconfig)
    )
    async with AsyncExitStack() as stack:
        try:
            cluster = await stack.enter_async_context(kubernetes_client.open_cluster(load, clock))
        except ClusterError as error:
            raise BadSetting(SCALING, "knative", f"no cluster to speak to: {error.api_failure.message}") from error
        yield cluster


def build_role_label(settings: ClusterSettings, cluster: "KubernetesCluster", clock: Clock) -> RoleLabel | None:
    """Return the role label of this process's pod; None if the pod is unknown."""
    return None if settings.pod is None else RoleLabel(cluster, settings.namespace, settings.pod, clock)


async def build_cluster_backend(
    stack: AsyncExitStack,
    services: ControlPlaneServices,
    settings: ClusterSettings,
    api: ClusterApi,
    connector_factory: ConnectorFactory,
    stop: asyncio.Event,
) -> ReplicaBackend:
    """Build the backend of a cluster. On return the feed has all running replicas, unless `stop` is set."""
    jobs = await build_zygote_push_jobs(stack, services)
    pods = PodTable(services.clock, device_class_of(settings.pods), settings.unpooled_devices)
    outcomes = StartOutcomes(services.registry, services.feed, services.tasks)
    renderer = ServiceRenderer(settings.pods, settings.namespace, services.settings.kv_bytes, settings.unpooled_devices)
    context = ControllerContext(api, services.registry, services.feed, outcomes, pods, services.clock)
    pools = PoolController(
        context, settings.pools, settings.pods, services.settings.kv_bytes, PodClient(connector_factory), services.tasks
    )
    plane = KnativeController(context, renderer, pools, settings.overlap_s)
    _register_metrics(services.telemetry.page, pods, pools, plane, outcomes)
    services.registry.on_changed = plane.tick
    services.registry.meanwhile = plane.find_previous_versions
    services.tasks.start_loop("cluster", plane.run)
    services.tasks.start_loop("declarations", _build_custom_resources(services, settings, api, pods, plane).run)
    await first_completed(plane.synced.wait(), stop.wait())

    async def ready() -> bool:
        return plane.synced.is_set()

    async def status(models: tuple[ModelStatus, ...]) -> Status:
        this_process = ProcessStatus(name="controlplane", healthy=True, ready=await ready())
        now_s = services.clock.wall_s()
        pending = tuple(pending_replicas(row, now_s) for row in plane.node_forecasts.pending())
        return Status(
            processes=(this_process,), cache=None, device=None, models=models, pending=pending,
            pools=pod_pools(pools.count_pods()),
        )  # fmt: skip

    router = cluster_api.router(services.telemetry)
    # No `find_live_replicas`: a pod's container may restart under a new runtime id. Pods report to the ledger instead.
    return ReplicaBackend(
        pods, outcomes, plane, jobs, ready, status, _ignore_requests, None, (router,), plane.find_start_obstacle
    )


def _register_metrics(
    page: MetricsPage, pods: PodTable, pools: PoolController, plane: KnativeController, outcomes: StartOutcomes
) -> None:
    page.callback(
        "kelvin_replicas", "Pods by state.", MetricKind.GAUGE, ("state",),
        lambda: series_by_label((str(state), sum(pod.state is state for pod in pods)) for state in STATES),
    )  # fmt: skip
    page.callback(
        "kelvin_pool_pods", "Pods that wait or serve, by state.", MetricKind.GAUGE, ("pool", "state"), pools.count_pods
    )
    register_pending_metric(
        page,
        lambda: {
            (row.node.device, row.node.zone, row.node.spot): row.replicas for row in plane.node_forecasts.pending()
        },
    )
    page.callback(
        "kelvin_cluster_refused_objects", "Objects that the cluster refuses or changes.", MetricKind.GAUGE, ("reason",),
        lambda: series_by_label((reason, found[reason]) for found in (plane.refusals(),) for reason in REASONS),
    )  # fmt: skip
    page.callback(
        "kelvin_cluster_versions_behind", "Versions that run an older image, or older settings of Kelvin's own.",
        MetricKind.GAUGE, ("reason",),
        lambda: series_by_label((reason, _count_behind(outcomes, reason)) for reason in BEHIND_REASONS),
    )  # fmt: skip


def _build_custom_resources(
    services: ControlPlaneServices, settings: ClusterSettings, api: ClusterApi, pods: PodTable, plane: KnativeController
) -> CustomResourceController:
    stores = services.access_stores
    changes = AdminOperations(services.registry, stores.tenants, stores.keys, pods, plane, services.clock)
    return CustomResourceController(
        api, ModelResourceStore(changes), TenantResourceStore(changes), services.clock,
        lambda tenant: namespace_of(tenant, settings.pods), settings.namespace,
    )  # fmt: skip


def _count_behind(outcomes: StartOutcomes, reason: str) -> int:
    return sum(each.reason == reason for each in outcomes.images_behind.values())


def _ignore_requests(records: tuple[RequestRecord, ...]) -> None:
    """Do nothing: on a cluster no time to first token is forecast, so none is learned."""
