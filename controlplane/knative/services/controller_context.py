"""The parts of the control plane that all controllers of a cluster share."""

from dataclasses import dataclass

from controlplane.clock import Clock
from controlplane.knative.apply.cluster import ClusterApi
from controlplane.knative.services.pods import PodTable
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.registry import Registry
from controlplane.scaling.start_outcomes import StartOutcomes


@dataclass(frozen=True, slots=True)
class ControllerContext:
    """The cluster, the registry of models, and where controllers publish their observations."""

    api: ClusterApi
    registry: Registry
    feed: FeedHub
    outcomes: StartOutcomes
    pods: PodTable
    clock: Clock
