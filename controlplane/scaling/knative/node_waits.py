"""Watches the pods of versions for what they wait for, and tells activators when a start that waits for a node is
expected to be over. What is made of it is `policy/pending`'s.

It also reports why pods are not ready: that is the start problem of their version.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from contracts.control import Feed
from contracts.forecast import Forecast
from controlplane.clock import Clock
from controlplane.feed import FeedHub
from controlplane.policy.knative_seen import Service
from controlplane.policy.labels import OURS_SELECTOR, Place
from controlplane.policy.pending import Nodes, Pending, Trouble, seen_of
from controlplane.scaling.knative.cluster import ClusterApi, Json
from controlplane.scaling.knative.view import follow

SAY_S: Final = 10.0  # between two words on one wait: it lasts longer than was said, and activators come


class NodeWaits:
    """Of all versions. `service_at` returns the Service at a place. `report_trouble` is called with a Service, what
    keeps its pods from being ready now, and what did before, whenever that changes. None is nothing.
    """

    def __init__(
        self,
        api: ClusterApi,
        service_at: Callable[[Place], Service | None],
        report_trouble: Callable[[Service, Trouble | None, Trouble | None], None],
        feed: FeedHub,
        clock: Clock,
    ) -> None:
        self._api = api
        self._report_trouble = report_trouble
        self._reported: dict[Place, tuple[Service, Trouble]] = {}  # troubles that hold, as they were reported
        self._service_at = service_at
        self._feed = feed
        self._clock = clock
        self._nodes = Nodes()
        self._synced = asyncio.Event()

    def __repr__(self) -> str:
        return f"<NodeWaits {'synced' if self.is_known else 'UNKNOWN'} {self._nodes!r}>"

    @property
    def is_known(self) -> bool:
        """Whether pods are seen at all, which a cluster may not allow."""
        return self._synced.is_set()

    def pending(self) -> tuple[Pending, ...]:
        """Replicas that wait for a node, by what they ask of one."""
        return self._nodes.pending()

    async def run(self) -> None:
        """Until cancelled. It may be run again then: pods are seen anew, and what was measured is kept."""
        self._synced.clear()
        self._nodes.forget()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(self._api, "v1", "Pod", OURS_SELECTOR, self._take, self._synced))
            tasks.create_task(self._repeat(), name="waits for nodes")

    async def _repeat(self) -> None:
        while True:
            await self._clock.sleep(SAY_S)
            for service in tuple(self._nodes.services()):
                self._say(service)
            if self._synced.is_set():
                # The Service of a pod may not have been known before, or the pod may have gone while nobody watched.
                for service in {*self._nodes.troubled(), *self._reported}:
                    self._look_at_trouble(service)

    def _take(self, place: Place, obj: Json | None) -> None:
        before = self._nodes.service_of(place)
        service = self._nodes.pod(place, None if obj is None else seen_of(obj))
        if service is not None:
            self._say(service)
        for each in {before, self._nodes.service_of(place)}:
            if each is not None:
                self._look_at_trouble(each)

    def _look_at_trouble(self, place: Place) -> None:
        """Report the trouble of the pods of the Service at `place` if it is another than was reported."""
        now, service = self._nodes.trouble(place), self._service_at(place)
        reported, before = self._reported.get(place, (None, None))
        if now == before:
            return
        if now is None:
            del self._reported[place]
            service = reported  # a Service may be deleted before its pods are gone
        elif service is not None:
            self._reported[place] = service, now
        if service is not None:
            self._report_trouble(service, now, before)

    def _say(self, place: Place) -> None:
        """Of one whose version is not known yet, next time."""
        service, left_s = self._service_at(place), self._nodes.ready_in_s(place, self._clock.wall_s())
        if service is None or left_s is None:
            return
        of = service.of
        row = Forecast(tenant=of.tenant, model=of.model, version=of.version, ready_in_ms=round(left_s * 1000))
        self._feed.publish(Feed(forecasts=(row,)))
