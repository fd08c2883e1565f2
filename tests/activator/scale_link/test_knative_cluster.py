"""An activator on a cluster: Knative's autoscaler is told what is asked for, and what it starts is used."""

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
DOOR = "/readyz?exclude=autoscaler"  # as its kubelet asks


@asynccontextmanager
async def on_a_cluster(tmp_path: Path) -> AsyncIterator[tuple[ActivatorWorld, StrictAutoscaler, FakePod]]:
    """Ready, of a version at zero that Knative scales, and the pod that it will have."""
    autoscaler, pod = StrictAutoscaler(NAME), FakePod()
    await autoscaler.start()
    await pod.start()
    try:
        async with world(tmp_path, autoscaler=autoscaler.url) as here:
            await here.publish(revisions=(REVISION,))
            yield here, autoscaler, pod
            assert here.control.posts == [], "there is one decider"
    finally:
        await autoscaler.stop()
        await pod.stop()
    assert autoscaler.wrong == []
    assert pod.wrong == []


def row_of(pod: FakePod) -> ReplicaRow:
    """As the control plane tells of a pod that isn't ready."""
    return msgspec.structs.replace(replica_row("m-aa-1", 2), address="", url=pod.url, restore=(), unproven=True)


@pytest.mark.parametrize("forgets", [False, True], ids=["it was told once", "it was started anew meanwhile"])
async def test_version_scales_from_zero_and_back(tmp_path: Path, forgets: bool) -> None:
    """The first request is told at once, as one; its pod is used once it answers for itself; then comes a zero, then
    nothing. Who waits while the autoscaler is restarted is told of again.
    """

    async with on_a_cluster(tmp_path) as (here, autoscaler, pod):
        asking = asyncio.create_task(here.post())
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
        assert not pod.replica.calls, "it has not said that it takes requests"
        pod.is_ready = True
        got = await asking
        assert got.status == 200, got.body
        assert pod.probes.count(200) == 1
        told = len(autoscaler.stats)
        await autoscaler.until(lambda heard: len(heard.stats) > told and heard.stats[-1].concurrency == 0)
        assert {each.pod for each in autoscaler.stats} == {first.pod}


async def test_without_the_autoscaler_what_runs_serves_on(tmp_path: Path) -> None:
    """It says that it isn't heard, and answers; its door is open all the while. Then it is heard again."""

    async with on_a_cluster(tmp_path) as (here, autoscaler, pod):
        pod.is_ready = True
        here.control.publish(row_of(pod))
        assert (await here.post()).status == 200
        assert (await until_heard(here, True)).status == 200
        await autoscaler.leave()
        assert (await until_heard(here, False)).status == 503
        assert (await here.own(DOOR)).status == 200
        assert 'kelvin_autoscaler_connected{process="activator"} 0' in await here.page()
        assert (await here.post()).status == 200
        autoscaler.is_away = False
        assert (await until_heard(here, True)).status == 200


async def test_unheard_activator_is_not_ready(tmp_path: Path) -> None:
    """Also where it knows all else; who comes all the same is answered. Heard once, it is."""

    async with on_a_cluster(tmp_path) as (here, autoscaler, pod):
        pod.is_ready = True
        await here.publish(row_of(pod))
        autoscaler.is_away = True
        assert await here.terminate() == 0
        await here.restart("/healthz")
        await here.settled()
        ready = await here.own("/readyz")
        assert (ready.status, ready.json["feed"], ready.json["autoscaler"]) == (503, "live", False)
        assert (await here.own(DOOR)).status == 503
        assert (await here.post()).status == 200
        autoscaler.is_away = False
        assert (await until_heard(here, True)).status == 200
        assert (await here.own(DOOR)).status == 200


async def until_heard(here: ActivatorWorld, is_so: bool) -> ReceivedResponse:
    """What it says of itself once it says that."""
    async with asyncio.timeout(30):
        while (ready := await here.own("/readyz")).json["autoscaler"] is not is_so:
            await asyncio.sleep(0.02)
    return ready
