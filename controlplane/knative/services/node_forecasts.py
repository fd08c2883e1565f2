"""Watch versions' pods that wait for a node, and tell activators when their starts will probably be over.

`knative/policy/pending_replicas.py` computes the forecasts. This module also reports why pods are not ready: the start
problem of their version.
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

FORECAST_INTERVAL_S: Final = 10.0  # between two forecasts of one wait: forecasts prove wrong, activators come


class NodeForecasts:
    """Forecasts and pod problems of all versions. `service_at` returns the Service at a place. Calls
    `on_problem_changed(service, now, before)` when the reason changes why none of its pods is ready; None is no
    problem.
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
        self._reported: dict[NamespacedName, tuple[Service, PodProblem]] = {}  # present problems, as reported
        self._service_at = service_at
        self._feed = feed
        self._clock = clock
        self._pod_waits = PodWaits()
        self._synced = asyncio.Event()

    def __repr__(self) -> str:
        return f"<NodeForecasts {'synced' if self.is_known else 'UNKNOWN'} {self._pod_waits!r}>"

    @property
    def is_known(self) -> bool:
        """Return whether pods can be watched. A cluster may not allow it."""
        return self._synced.is_set()

    def pending(self) -> tuple[Pending, ...]:
        """Return the replicas that wait for a node, by the class of node that they need."""
        return self._pod_waits.pending()

    async def run(self) -> None:
        """Watch and forecast until cancelled. A later run lists the pods again, and keeps the measured times."""
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
                # The Service of a pod may not have been known before, or the pod may have gone while no watch ran.
                for service in {*self._pod_waits.services_with_problem(), *self._reported}:
                    self._report_problem_change(service)

    def _update_pod(self, object_name: NamespacedName, obj: Json | None) -> None:
        before = self._pod_waits.service_of(object_name)
        service = self._pod_waits.update_pod(object_name, None if obj is None else parse_pod(obj))
        if service is not None:
            self._publish_forecast(service)
        for each in {before, self._pod_waits.service_of(object_name)}:
            if each is not None:
                self._report_problem_change(each)

    def _report_problem_change(self, object_name: NamespacedName) -> None:
        """Report the problem of the pods of this Service if it changed."""
        now, service = self._pod_waits.problem(object_name), self._service_at(object_name)
        reported, before = self._reported.get(object_name, (None, None))
        if now == before:
            return
        if now is None:
            del self._reported[object_name]
            service = reported  # a Service may be deleted before its pods are gone
        elif service is not None:
            self._reported[object_name] = service, now
        if service is not None:
            self._on_problem_changed(service, now, before)

    def _publish_forecast(self, object_name: NamespacedName) -> None:
        """Publish the Service's forecast. If its version is not known yet, a later call publishes it."""
        service, left_s = (
            self._service_at(object_name),
            self._pod_waits.forecast_ready_s(object_name, self._clock.wall_s()),
        )
        if service is None or left_s is None:
            return
        key = service.key
        row = Forecast(tenant=key.tenant, model=key.model, version=key.version, ready_in_ms=round(left_s * 1000))
        self._feed.publish(Feed(forecasts=(row,)))
