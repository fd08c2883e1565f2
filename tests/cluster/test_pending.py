"""Pods without a node, as a control plane process reports them to operators, metrics and activators. The test plays
Knative and the scheduler.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from activator.queue.policy.wait_estimate import StartForecasts, is_too_late
from activator.routing.policy.version_key import VersionKey
from controlplane.knative.policy.knative_service import service_name
from controlplane.knative.policy.pending_replicas import GUESS_S, START_GUESS_S
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.serving.start_forecast import Forecast
from kelvin.contracts.traffic_errors import DeadlineTooShort
from tests.cluster.fake_knative import NAMESPACE, FakeKnative, inside, register, running
from tests.cluster.kube_api.status_answers import Json
from tests.controlplane.builders import digest
from tests.controlplane.control_plane_server import ControlPlaneClient, FeedReader, open_feed
from tests.eventually import eventually

SPOT = {
    "cluster_nodes": "kelvin.dev/capacity=spot,topology.kubernetes.io/zone=eu-1a",
    "cluster_tolerations": "kelvin.dev/capacity,nvidia.com/gpu",
}
ROW = {"device": "gpu", "zone": "eu-1a", "spot": "only"}
LABELS = 'process="controlplane",device="gpu",zone="eu-1a",spot="only"'


class Scene:
    """A version whose first revision exists, and the feed of its control plane."""

    def __init__(self, knative: FakeKnative, client: ControlPlaneClient, reader: FeedReader) -> None:
        self._server, self._knative = knative.server, knative
        self.client, self._reader = client, reader
        self.failures: list[str] = []

    def pod(self, name: str, *conditions: Json) -> Json:
        """Create a pod with the spec of the Service and the labels of a Deployment."""
        of = self._knative.service()
        template, service = of["spec"]["template"], of["metadata"]["name"]
        labels = template["metadata"]["labels"] | {"serving.knative.dev/service": service}
        fields = ("containers", "nodeSelector", "tolerations")
        return self._server.create({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
            "spec": {field: template["spec"][field] for field in fields},
            "status": {"phase": "Pending", "conditions": list(conditions)},
        })  # fmt: skip

    def becomes(self, pod: Json, *conditions: Json) -> None:
        """Set the pod's conditions, as a scheduler or a kubelet does."""
        self._server.set_status(pod, {"phase": "Pending", "conditions": list(conditions)})

    def fails(self, reason: str) -> None:
        """Set the Revision failed, as Knative does."""
        name = f"{service_name('m', digest('a'))}-00001"
        template = self._knative.service()["spec"]["template"]
        about = {"name": name, "namespace": NAMESPACE, "labels": template["metadata"]["labels"]}
        revision = {"apiVersion": "serving.knative.dev/v1", "kind": "Revision", "metadata": about}
        condition = {"type": "Ready", "status": "False", "reason": reason, "lastTransitionTime": at(0.0)}
        if not self._server.objects("serving.knative.dev/v1", "Revision", NAMESPACE):
            self._server.create({**revision, "spec": template["spec"]})
        self._server.set_status(revision, {"conditions": [condition]})

    async def read_until(self, holds: Callable[[Feed], Any]) -> Feed:
        """Return the next feed line that fulfils the condition."""
        while True:
            line = await self._reader.line()
            self.failures += [each.message for each in line.failures]
            if holds(line):
                return line

    async def forecast(self, holds: Callable[[float], bool] = lambda ready_in_s: True) -> Forecast:
        """Return the next forecast that fulfils the condition. Forecasts repeat while a pod waits."""
        line = await self.read_until(lambda line: any(holds(each.ready_in_ms / 1000) for each in line.forecasts))
        return line.forecasts[0]

    async def pending(self) -> list[Json]:
        """Return the pending replicas of the status."""
        _, shown = await self.client.admin("GET", "/status")
        return [{name: row[name] for name in (*ROW, "replicas", "measured")} for row in shown["pending"]]

    async def is_scraped(self, line: str) -> bool:
        """Return whether the metrics page has this line."""
        _, text = await self.client.admin("GET", "/metrics")
        return line in text.splitlines()


def at(seconds_ago: float) -> str:
    """Return a time as an API server writes it, in whole seconds."""
    return (datetime.now(UTC) - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def unscheduled(seconds_ago: float = 0.0) -> Json:
    return {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": at(seconds_ago)}


def scheduled(seconds_ago: float = 0.0) -> Json:
    return {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(seconds_ago)}


@asynccontextmanager
async def scene(knative: FakeKnative, tmp_path: Path) -> AsyncIterator[Scene]:
    """Yield a version that waits for its first pod, with the control plane as a process."""
    with running(tmp_path, **SPOT):
        async with inside(tmp_path) as client, open_feed(client) as reader:
            await register(client)
            await eventually(lambda: bool(knative.services()), "its Service")
            name = f"{service_name('m', digest('a'))}-00001"
            knative.server.set_status(knative.service(), {"conditions": [], "latestCreatedRevisionName": name})
            it = Scene(knative, client, reader)
            await it.read_until(lambda line: line.revisions)
            yield it


async def test_a_replica_without_a_node_is_counted_and_foretold(knative: FakeKnative, tmp_path: Path) -> None:
    """It is counted by device, zone and spot. The forecast is a default first, and a measured time later."""
    async with scene(knative, tmp_path) as it:
        assert await it.pending() == []
        one = it.pod("one", unscheduled(100))
        forecast_row = await it.forecast()
        assert (forecast_row.tenant, forecast_row.model, forecast_row.version) == ("default", "m", digest("a"))
        assert GUESS_S + START_GUESS_S - 100 - forecast_row.ready_in_ms / 1000 == pytest.approx(0.0, abs=20)
        assert await it.pending() == [ROW | {"replicas": 1, "measured": 0}]
        assert await it.is_scraped(f"kelvin_pending_replicas{{{LABELS}}} 1")
        it.becomes(one, scheduled(40))
        await it.forecast(lambda ready_in_s: ready_in_s == 0)
        assert await it.pending() == [ROW | {"replicas": 0, "measured": 1}]
        assert await it.is_scraped(f"kelvin_pending_replicas{{{LABELS}}} 0")
        knative.server.delete(one)
        it.pod("two", unscheduled(10))
        forecast_row = await it.forecast(lambda ready_in_s: ready_in_s > 0)
        assert 60 + START_GUESS_S - 10 - forecast_row.ready_in_ms / 1000 == pytest.approx(0.0, abs=20)


async def test_waiting_requests_get_a_node_forecast(knative: FakeKnative, tmp_path: Path) -> None:
    """A revision without a node has not failed. Control: one with a missing image has."""
    async with scene(knative, tmp_path) as it:
        it.pod("one", unscheduled())
        forecast_row = await it.forecast()
        it.fails("Unschedulable")
        it.becomes(it.pod("two", unscheduled()), scheduled())
        await it.forecast()
        assert it.failures == []
        it.fails("ImagePullBackOff")
        await it.read_until(lambda line: line.failures)
        assert it.failures == ["no replica could be started: its image can't be pulled"]
        # An activator refuses a request with a shorter deadline at once, and says when to retry.
        starts = StartForecasts()
        key = VersionKey("default", "m", digest("a"))
        starts.set_forecast(key, forecast_row, now=0.0)
        expected_s = starts.wait_estimate(key, now=10.0).remaining_s
        assert expected_s is not None
        assert is_too_late(expected_s, 30.0)
        assert not is_too_late(expected_s, 300.0)
        refused = DeadlineTooShort(expected_s, 30.0, is_starting=True).retry_after_s
        assert refused == pytest.approx(GUESS_S + START_GUESS_S - 10, abs=20)


async def test_a_pod_that_has_its_node_is_no_pending_replica(knative: FakeKnative, tmp_path: Path) -> None:
    """Control: it starts normally, and is neither counted nor forecast."""
    async with scene(knative, tmp_path) as it:
        it.pod("one", scheduled())
        knative.pods("one")
        await it.read_until(lambda line: line.replicas)
        assert await it.pending() == []
