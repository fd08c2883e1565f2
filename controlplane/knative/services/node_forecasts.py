"""Watches the pods of versions for what they wait for, and tells activators when a start that waits for a node is
expected to be over. What is made of it is `pending_replicas`'s.

It also reports why pods are not ready: that is the start problem of their version.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from controlplane.clock import Clock
from controlplane.knative.apply.cluster import ClusterApi, Json
from controlplane.knative.apply.object_cache import follow
from controlplane.knative.policy.object_labels import OURS_SELECTOR, NamespacedName
from controlplane.knative.policy.object_status import Service
from controlplane.knative.policy.pending_replicas import Pending, PodProblem, PodWaits, parse_pod
from controlplane.registry.feed_hub import FeedHub
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.serving.start_forecast import Forecast

FORECAST_INTERVAL_S: Final = 10.0  # between two words on one wait: it lasts longer than was said, and activators come


class NodeForecasts:
    """Of all versions. `service_at` returns the Service at a place. `on_problem_changed` is called with a Service, what
    keeps its pods from being ready now, and what did before, whenever that changes. None is nothing.
    """

    def __init__(
        self,
        api: ClusterApi,
        service_at: Callable[[NamespacedName], Service | None],
        on_problem_changed: Callable[[Service, PodProblem | None, PodProblem | None], None],
        feed: FeedHub,
        clock: Clock,
    ) -> None:
        self._api = api
        self._on_problem_changed = on_problem_changed
        self._reported: dict[
            NamespacedName, tuple[Service, PodProblem]
        ] = {}  # troubles that hold, as they were reported
        self._service_at = service_at
        self._feed = feed
        self._clock = clock
        self._pod_waits = PodWaits()
        self._synced = asyncio.Event()

    def __repr__(self) -> str:
        return f"<NodeForecasts {'synced' if self.is_known else 'UNKNOWN'} {self._pod_waits!r}>"

    @property
    def is_known(self) -> bool:
        """Whether pods are seen at all, which a cluster may not allow."""
        return self._synced.is_set()

    def pending(self) -> tuple[Pending, ...]:
        """Replicas that wait for a node, by what they ask of one."""
        return self._pod_waits.pending()

    async def run(self) -> None:
        """Until cancelled. It may be run again then: pods are seen anew, and what was measured is kept."""
        self._synced.clear()
        self._pod_waits.forget()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(self._api, "v1", "Pod", OURS_SELECTOR, self._update_pod, self._synced))
            tasks.create_task(self._repeat(), name="waits for nodes")

    async def _repeat(self) -> None:
        while True:
            await self._clock.sleep(FORECAST_INTERVAL_S)
            for service in tuple(self._pod_waits.services()):
                self._publish_forecast(service)
            if self._synced.is_set():
                # The Service of a pod may not have been known before, or the pod may have gone while nobody watched.
                for service in {*self._pod_waits.services_with_problem(), *self._reported}:
                    self._report_problem_change(service)

    def _update_pod(self, place: NamespacedName, obj: Json | None) -> None:
        before = self._pod_waits.service_of(place)
        service = self._pod_waits.pod(place, None if obj is None else parse_pod(obj))
        if service is not None:
            self._publish_forecast(service)
        for each in {before, self._pod_waits.service_of(place)}:
            if each is not None:
                self._report_problem_change(each)

    def _report_problem_change(self, place: NamespacedName) -> None:
        """Report the trouble of the pods of the Service at `place` if it is another than was reported."""
        now, service = self._pod_waits.problem(place), self._service_at(place)
        reported, before = self._reported.get(place, (None, None))
        if now == before:
            return
        if now is None:
            del self._reported[place]
            service = reported  # a Service may be deleted before its pods are gone
        elif service is not None:
            self._reported[place] = service, now
        if service is not None:
            self._on_problem_changed(service, now, before)

    def _publish_forecast(self, place: NamespacedName) -> None:
        """Of one whose version is not known yet, next time."""
        service, left_s = self._service_at(place), self._pod_waits.forecast_ready_s(place, self._clock.wall_s())
        if service is None or left_s is None:
            return
        of = service.of
        row = Forecast(tenant=of.tenant, model=of.model, version=of.version, ready_in_ms=round(left_s * 1000))
        self._feed.publish(Feed(forecasts=(row,)))
