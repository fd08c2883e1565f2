"""An activator on a cluster: it reports load to Knative's autoscaler, and uses the pods that Knative starts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kelvin.contracts.serving.control_messages import ReplicaRow, RevisionRow
from tests.activator.control import VERSION, replica_row
from tests.activator.scale_link.knative_autoscaler import StrictAutoscaler
from tests.activator.upstream.pod import FakePod
from tests.activator.world import ActivatorWorld, ReceivedResponse, world
from tests.eventually import eventually

REVISION = RevisionRow(tenant="default", model="m", version=VERSION, namespace="models", name="m-aa-00001")
NAME = "models/m-aa-00001"
KUBELET_PROBE = "/readyz?exclude=autoscaler"  # as its kubelet asks


@asynccontextmanager
async def on_a_cluster(tmp_path: Path) -> AsyncIterator[tuple[ActivatorWorld, StrictAutoscaler, FakePod]]:
    """Start a ready activator with a version at zero, a fake autoscaler, and the pod that the version will have."""
    autoscaler, pod = StrictAutoscaler(NAME), FakePod()
    await autoscaler.start()
    await pod.start()
    try:
        async with world(tmp_path, autoscaler=autoscaler.url) as here:
            await here.publish(revisions=(REVISION,))
            yield here, autoscaler, pod
            assert here.control.posts == [], "only Knative gets reports"
    finally:
        await autoscaler.stop()
        await pod.stop()
    assert autoscaler.wrong == []
    assert pod.wrong == []


def row_of(pod: FakePod) -> ReplicaRow:
    """Return the control plane's row of a pod that is not ready."""
    return msgspec.structs.replace(replica_row("m-aa-1", 2), address="", url=pod.url, restore=(), unproven=True)


@pytest.mark.parametrize("forgets", [False, True], ids=["the autoscaler stays up", "the autoscaler restarts"])
async def test_version_scales_from_zero_and_back(tmp_path: Path, forgets: bool) -> None:
    """The first request is reported at once, as one. Its pod is used once its probe succeeds. Then a zero is reported,
    and nothing more. A request that waits during a restart of the autoscaler is reported again.
    """

    async with on_a_cluster(tmp_path) as (here, autoscaler, pod):
        request_task = asyncio.create_task(here.post())
        await autoscaler.until(lambda heard: len(heard.stats) >= 1)
        first = autoscaler.stats[0]
        assert (first.revision, first.concurrency, first.requests) == (NAME, 1.0, 1.0)
        assert first.pod.startswith("activator-")
        if forgets:
            await autoscaler.leave()
            autoscaler.is_away = False
            await autoscaler.until(lambda heard: any(each.connection and each.concurrency for each in heard.stats))
        here.control.publish(row_of(pod))
        await eventually(lambda: len(pod.probes) >= 3)
        assert not pod.replica.calls, "its probe has not succeeded"
        pod.is_ready = True
        got = await request_task
        assert got.status == 200, got.body
        assert pod.probes.count(200) == 1
        told = len(autoscaler.stats)
        await autoscaler.until(lambda heard: len(heard.stats) > told and heard.stats[-1].concurrency == 0)
        assert {each.pod for each in autoscaler.stats} == {first.pod}


async def test_without_the_autoscaler_what_runs_serves_on(tmp_path: Path) -> None:
    """`/readyz` reports the outage, requests are served, and its kubelet probe stays 200. Then the link is restored."""

    async with on_a_cluster(tmp_path) as (here, autoscaler, pod):
        pod.is_ready = True
        here.control.publish(row_of(pod))
        assert (await here.post()).status == 200
        assert (await until_heard(here, True)).status == 200
        await autoscaler.leave()
        assert (await until_heard(here, False)).status == 503
        assert (await here.own(KUBELET_PROBE)).status == 200
        assert 'kelvin_autoscaler_connected{process="activator"} 0' in await here.page()
        assert (await here.post()).status == 200
        autoscaler.is_away = False
        assert (await until_heard(here, True)).status == 200


async def test_unheard_activator_is_not_ready(tmp_path: Path) -> None:
    """This holds even if the feed is live. Requests are served. Once the autoscaler hears it, it is ready."""

    async with on_a_cluster(tmp_path) as (here, autoscaler, pod):
        pod.is_ready = True
        await here.publish(row_of(pod))
        autoscaler.is_away = True
        assert await here.terminate() == 0
        await here.restart("/healthz")
        await here.settled()
        ready = await here.own("/readyz")
        assert (ready.status, ready.json["feed"], ready.json["autoscaler"]) == (503, "live", False)
        assert (await here.own(KUBELET_PROBE)).status == 503
        assert (await here.post()).status == 200
        autoscaler.is_away = False
        assert (await until_heard(here, True)).status == 200
        assert (await here.own(KUBELET_PROBE)).status == 200


async def until_heard(here: ActivatorWorld, is_so: bool) -> ReceivedResponse:
    """Wait until `/readyz` reports this state of the autoscaler link."""
    async with asyncio.timeout(30):
        while (ready := await here.own("/readyz")).json["autoscaler"] is not is_so:
            await asyncio.sleep(0.02)
    return ready
