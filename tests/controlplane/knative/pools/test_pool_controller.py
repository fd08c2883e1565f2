"""PoolController on a cluster in memory: which parked pod gets a version, adoption after a takeover, failures of
pods.
"""

import asyncio
from collections import deque
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from controlplane.knative.apply.cluster import Denied, Ref
from controlplane.knative.policy.knative_service import NODE_S
from controlplane.knative.policy.namespace_requirements import NamespaceRequirements
from controlplane.knative.pools.pool_actuator import POD_WAIT_S
from controlplane.knative.pools.pool_pods import PodState
from controlplane.registry.policy.domain import VersionKey
from controlplane.registry.tenant_store import insert_tenant
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.artifacts.runtime_control import BindPodRequest
from kelvin.contracts.errors import NotFound, Refused, Unavailable
from kelvin.contracts.serving.control_messages import ReplicaRow, RestoreFailure
from tests.controlplane.builders import BY, NOW_S, TENANT, digest, key, registration, stats
from tests.controlplane.knative.controller_fixture import (
    CLUSTER,
    CLUSTER_WITH_CONTROL,
    POOLS,
    SETTINGS,
    ControllerScenario,
    FakeKnativeCluster,
    FakePods,
    Pod,
    address,
    control_url,
    create_controller,
    running_pools,
)
from tests.controlplane.knative.fake_cluster import running_loop


async def test_pooled_version_is_bound_and_released(tmp_path: Path) -> None:
    """The version has no Service. The best-fitting pod is bound, and in the feed once it serves, with a higher deletion
    cost. When idle it drains first, and is released and parked again.
    """
    async with running_pools(tmp_path) as it:
        assert it.cluster.services() == {"kelvin-pool--small", "kelvin-pool--large"}
        await it.register()
        await it.register(model="other")
        await it.let_pass(3)
        assert not any(name.startswith("m-") for name in it.cluster.services())
        assert any(name.startswith("other-") for name in it.cluster.services()), (
            "control: a model without a pool has its own Service"
        )
        await it.park_pods("large", "l1")
        await it.park_pods("small", "s1")
        await it.read_feed()
        await it.report_load()
        assert it.states() == {"l1": PodState.PARKED, "s1": PodState.BINDING}
        assert it.pod("s1").bind_request == BindPodRequest(
            tenant=TENANT, model="m", version=digest("a"), device_class="cpu-1", store=CLUSTER.store_url,
            weight_bytes=4096,
        )  # fmt: skip
        assert not any(line.replicas for line in await it.read_feed())
        it.pod("s1").restore_allowed.set()
        await it.let_pass(2)
        (row,) = [row for line in await it.read_feed() for row in line.replicas]
        assert (row.url, row.max_streams, row.model) == (f"http://{address('s1')}:8012", 4, "m")
        assert (it.cluster.cost("s1"), it.cluster.cost("l1")) == ("1000", "0")
        assert [each.runtime_id for each in it.table.replicas_of(key())] == [row.runtime_id]

        it.controller.observe(stats(key(), 0.0, 0))
        await it.let_pass(200)
        lines = await it.read_feed()
        assert [each.draining for line in lines for each in line.replicas] == [True]
        assert [name for line in lines for name in line.removed_replicas] == [row.runtime_id]
        assert it.pods.calls[-1] == ("release", control_url("s1"))
        assert it.states()["s1"] is PodState.PARKED
        assert it.cluster.cost("s1") == "0"
        assert not it.table.replicas_of(key())


@pytest.mark.parametrize("idle", ["auto", "sleep", "warm"])
async def test_idle_setting_of_one_machine_holds_no_pod(tmp_path: Path, idle: str) -> None:
    """A database from a single machine may have this setting. A cluster ignores it and scales to zero."""
    async with running_pools(tmp_path) as it:
        await it.register()
        await it.registry.rescale(BY, TENANT, "m", {"idle": idle}, NOW_S)
        await it.park_pods("small", "s1")
        await it.report_load()
        it.pod("s1").restore_allowed.set()
        await it.let_pass(2)
        assert it.states() == {"s1": PodState.BOUND}
        it.controller.observe(stats(key(), 0.0, 0))
        await it.let_pass(200)
        assert it.states() == {"s1": PodState.PARKED}


async def test_pool_rows_report_taken_waiting_and_buffer(tmp_path: Path) -> None:
    """The reported concurrency is taken pods, waiting starts and the buffer, divided among the feed's readers."""
    async with running_pools(tmp_path) as it:
        for each in ("small", "large"):
            it.cluster.set_pool_ready(each)
        await it.register()
        await it.registry.rescale(BY, TENANT, "m", {"max": 8}, NOW_S)
        await it.let_pass(2)
        assert await shares(it) == {"small-00001": 2.0, "large-00001": 1.0}
        await it.report_load()
        await it.let_pass(2)
        assert await shares(it) == {"small-00001": 3.0, "large-00001": 1.0}, "one waits"
        await it.park_pods("small", "s1")
        it.pod("s1").restore_allowed.set()
        await it.let_pass(2)
        assert await shares(it) == {}, "it is taken, so the sum is unchanged"
        with it.feed.subscribe():
            await it.let_pass(2)
            assert await shares(it) == {"small-00001": 1.5, "large-00001": 0.5}
            assert [row.wanted for row in it.feed.snapshot().pools] == [1, 3]


async def shares(it: ControllerScenario) -> dict[str, float]:
    """Return the newest share of each pool since the last call."""
    return {row.name: row.share for line in await it.read_feed() for row in line.pools}


async def test_start_takes_the_first_free_pod_or_fails(tmp_path: Path) -> None:
    """Without a pod the start fails at its time limit, and the requests with it."""
    async with running_pools(tmp_path) as it:
        await it.register()
        await it.report_load()
        await it.park_pods("small", "s1")
        assert it.states() == {"s1": PodState.BINDING}
        it.pod("s1").restore_allowed.set()
        await it.park_pods("small")
        await it.register(model="n")
        await it.read_feed()
        waited_s = 0
        while not (reported := await failures(it)):
            assert waited_s <= POD_WAIT_S + 60
            await it.report_load(model="n")
            await it.let_pass(30)
            waited_s += 30
        assert waited_s >= NODE_S, "Knative may still bring a pod"
        assert {each.code for each in reported} == {"start_failed"}


async def failures(it: ControllerScenario) -> list[RestoreFailure]:
    return [failure for line in await it.read_feed() for failure in line.failures]


@pytest.mark.parametrize(
    ("failure", "binds", "reported"),
    [
        pytest.param(NotFound("version", "x"), 1, ["not_found"], id="the pod gives a reason: the start fails"),
        pytest.param(Unavailable("the pod"), 3, ["unavailable"], id="three pods are lost: the start fails"),
    ],
)
async def test_failed_bind_is_retried_on_other_pods(
    tmp_path: Path, failure: NotFound | Unavailable, binds: int, reported: list[str]
) -> None:
    """A pod that gives a reason fails the start. A lost pod is retried on other pods, three times in all."""
    async with running_pools(tmp_path) as it:
        await it.register()
        await it.park_pods("small", "s1", "s2", "s3", "s4")
        for name in ("s1", "s2", "s3", "s4"):
            it.pod(name).fails = Refused(failure)
            it.pod(name).restore_allowed.set()
        await it.read_feed()
        await it.report_load()
        assert len([what for what, _ in it.pods.calls if what == "bind"]) == binds
        lines = await it.read_feed()
        assert [each.code for line in lines for each in line.failures] == reported
        explained = [bool(line.start_problems) for line in lines if line.start_problems or line.failures]
        assert explained == [True, False], "a request that fails takes the problem into its timeline at that moment"


async def test_next_leader_adopts_bound_pods(tmp_path: Path) -> None:
    """Bound and binding pods are adopted. A pod with an unknown version is released."""
    pods = FakePods()
    ours = BindPodRequest(
        tenant=TENANT, model="m", version=digest("a"), device_class="cpu-1", store=CLUSTER.store_url, weight_bytes=4096
    )
    pods.pods[control_url("s1")] = Pod(bind_request=ours, is_ready=True)
    pods.pods[control_url("s2")] = Pod(bind_request=ours)
    pods.pods[control_url("s3")] = Pod(bind_request=msgspec.structs.replace(ours, version=digest("f")), is_ready=True)
    for pod in pods.pods.values():
        pod.restore_allowed.set()
    async with running_pools(tmp_path, pods) as it:
        await it.register()
        await it.registry.rescale(BY, TENANT, "m", {"max": 8, "min": 2}, NOW_S)
        await it.park_pods("small", "s1", "s2", "s3")
        found = it.states()
        assert (found["s1"], found["s2"]) == (PodState.BOUND, PodState.BOUND)
        assert len(it.table.replicas_of(key())) == 2
        await it.let_pass(3)
        assert ("release", control_url("s3")) in pods.calls
        assert it.states()["s3"] is PodState.PARKED


async def test_adopted_start_waits_for_another_pod(tmp_path: Path) -> None:
    """An earlier control plane bound it to a pod, and that pod goes. The start then waits for another pod."""
    pods = FakePods()
    ours = BindPodRequest(
        tenant=TENANT, model="m", version=digest("a"), device_class="cpu-1", store=CLUSTER.store_url, weight_bytes=4096
    )
    pods.pods[control_url("s1")] = Pod(bind_request=ours, fails=Refused(Unavailable("the pod")))
    async with running_pools(tmp_path, pods) as it:
        await it.register()
        await it.park_pods("small", "s1")
        await it.report_load()
        assert it.states() == {"s1": PodState.BINDING}
        it.pod("s1").restore_allowed.set()
        it.pod("s1").bind_request = None
        await it.park_pods("small")
        assert await failures(it) == []
        await it.park_pods("small", "s2")
        it.pod("s2").restore_allowed.set()
        await it.let_pass(2)
        assert it.states() == {"s2": PodState.BOUND}
        assert await failures(it) == []


async def test_version_that_waits_for_a_pod_says_so(tmp_path: Path) -> None:
    """The start problem ends once it has a pod."""
    async with running_pools(tmp_path) as it:
        await it.register()
        await it.report_load()
        await it.let_pass(2)
        (row,) = it.feed.snapshot().start_problems
        assert (row.problem.reason, row.problem) == ("no_room", it.outcomes.problem(key()))
        await it.park_pods("small", "s1")
        it.pod("s1").restore_allowed.set()
        await it.let_pass(2)
        assert it.feed.snapshot().start_problems == ()


EVERY_POD = {"small": tuple(f"s{n}" for n in range(8)), "large": tuple(f"l{n}" for n in range(4))}


async def test_minimum_yields_one_pod_to_a_waiting_tenant(tmp_path: Path) -> None:
    """One tenant's minimum holds all 12 pods. The first request of another tenant gets one of them."""
    guest = VersionKey("guest", "n", digest("b"))
    async with running_pools(tmp_path) as it:
        for name in (each for names in EVERY_POD.values() for each in names):
            it.pods.pods[control_url(name)] = Pod()
            it.pods.pods[control_url(name)].restore_allowed.set()
        await it.register()
        with pytest.raises(Refused, match="12 device slots"):
            it.controller.check_scale(it.registry.model(TENANT, "m"), ScaleSettings(min=13, max=20))
        await it.registry.rescale(BY, TENANT, "m", {"min": 12, "max": 20}, NOW_S)
        for pool, names in EVERY_POD.items():
            await it.park_pods(pool, *names)
        await it.let_pass(70)  # a stable window after the takeover
        assert list(it.states().values()) == [PodState.BOUND] * 12

        await it.registry._database.write(lambda connection: insert_tenant(connection, BY, "guest", NOW_S))
        await it.registry.register(registration("n", "b", tenant="guest"), NOW_S)
        it.controller.observe(stats(guest))
        assert it.outcomes.problem(guest) is not None, "it waits for a pod"
        for _ in range(40):
            it.controller.observe(stats(guest))
            await it.let_pass(1)
        assert len(it.table.replicas_of(guest)) == 1
        assert len(it.table.replicas_of(key())) == 11, "no more than one was taken"
        assert it.outcomes.problem(guest) is None


async def test_pooled_minimum_is_within_the_device_share(tmp_path: Path) -> None:
    """The pools have 12 pods, and the cluster has 4 devices, which another tenant uses as well."""
    other = ReplicaRow(
        runtime_id="other-1",
        tenant="other",
        model="own",
        version=digest("b"),
        address="",
        max_streams=1,
        draining=False,
        restore=(),
    )
    async with running_pools(tmp_path, devices=4) as it:
        await it.register()
        it.table.upsert(other)
        with pytest.raises(Refused, match="share of 4 device slots is 2"):
            it.controller.check_scale(it.registry.model(TENANT, "m"), ScaleSettings(min=3, max=20))


async def test_takeover_releases_no_busy_pod(tmp_path: Path) -> None:
    """Three pods serve when a new control plane starts. None is released before a stable window has passed; then only
    those that are not needed.
    """
    pods = FakePods()
    ours = BindPodRequest(
        tenant=TENANT, model="m", version=digest("a"), device_class="cpu-1", store=CLUSTER.store_url, weight_bytes=4096
    )
    for name in ("s1", "s2", "s3"):
        pods.pods[control_url(name)] = Pod(bind_request=ours, is_ready=True)
        pods.pods[control_url(name)].restore_allowed.set()
    async with running_pools(tmp_path, pods) as it:
        await it.register()
        await it.registry.rescale(BY, TENANT, "m", {"max": 8}, NOW_S)
        await it.park_pods("small", "s1", "s2", "s3")
        for _ in range(50):
            await it.report_load(concurrency=1.0)
            await it.let_pass(1)
        assert not [what for what in pods.calls if what[0] == "release"]
        assert set(it.states().values()) == {PodState.BOUND}
        for _ in range(100):
            await it.report_load(concurrency=1.0)
            await it.let_pass(1)
        assert list(it.states().values()).count(PodState.BOUND) == 1


async def test_restarted_or_terminating_pod_is_replaced(tmp_path: Path) -> None:
    """A pod that does not answer keeps serving. A restarted one is bound again, a terminating one drains, and one that
    is gone leaves the feed.
    """
    async with running_pools(tmp_path) as it:
        await it.register()
        await it.park_pods("small", "s1", "s2")
        for name in ("s1", "s2"):
            it.pod(name).restore_allowed.set()
        await it.report_load()
        (name,) = [name for name, state in it.states().items() if state is PodState.BOUND]
        (first,) = it.table.replicas_of(key())
        it.pod(name).is_unreachable = True
        await it.let_pass(10)
        assert it.table.replicas_of(key()) == (first,), "silence is no death"
        it.pod(name).is_unreachable = False
        it.pod(name).bind_request, it.pod(name).life = None, 7
        await it.report_load()
        await it.let_pass(10)
        (second,) = it.table.replicas_of(key())
        assert second.runtime_id != first.runtime_id

        (name,) = [name for name, state in it.states().items() if state is PodState.BOUND]
        (other,) = {"s1", "s2"} - {name}
        await it.read_feed()
        it.cluster.pool("small", "s1", "s2", leaving=(name,))
        await it.report_load()
        assert next(row.draining for line in await it.read_feed() for row in line.replicas)
        it.cluster.pool("small", other)
        await it.let_pass(3)
        assert set(it.states()) == {other}


async def test_pod_with_another_address_is_another_pod(tmp_path: Path) -> None:
    """A pod keeps its name after its node has rebooted. Its replica is lost, and it is asked at its new address."""
    async with running_pools(tmp_path) as it:
        await it.register()
        await it.park_pods("small", "s1")
        it.pod("s1").restore_allowed.set()
        await it.report_load()
        (before,) = it.table.replicas_of(key())
        await it.read_feed()
        it.pod("s1").is_unreachable = True  # its old address does not answer
        it.pods.pods[control_url("s9")] = Pod(life=2)
        it.pod("s9").restore_allowed.set()
        it.cluster.pool("small", "s1", moved={"s1": "s9"})
        await it.let_pass(3)
        assert before.runtime_id in [name for line in await it.read_feed() for name in line.removed_replicas]
        await it.report_load()
        await it.let_pass(3)
        (after,) = it.table.replicas_of(key())
        assert after.url == f"http://{address('s9')}:8012"


async def test_pods_of_several_slices_survive_a_resync(tmp_path: Path) -> None:
    """A slice has up to 100 pods of one address family. The watch delivers the slices one by one."""
    cluster, needs = FakeKnativeCluster(), NamespaceRequirements.of(CLUSTER_WITH_CONTROL)
    for tenant in ("default", "-pools"):
        cluster.create_namespace(tenant, needs)
    async with create_controller(tmp_path, cluster, pools=SETTINGS, spec=CLUSTER_WITH_CONTROL) as it:
        async with running_loop(it.controller):
            await it.register()
            await it.park_pods("small", "s1")
            await it.report_load()
            it.pod("s1").restore_allowed.set()
            await it.let_pass(2)
            assert it.states() == {"s1": PodState.BOUND}
            await it.read_feed()
        of_s1 = Ref("discovery.k8s.io/v1", "EndpointSlice", POOLS, "kelvin-pool--small-x")
        seen = cluster.objects.pop(of_s1)
        cluster.put({**seen, "metadata": {**seen["metadata"], "name": "kelvin-pool--small-a"}, "endpoints": None})
        cluster.put(seen)  # this slice comes after the other
        async with running_loop(it.controller):
            await it.let_pass(2)
            assert it.states() == {"s1": PodState.BOUND}
            assert [name for line in await it.read_feed() for name in line.removed_replicas] == []


async def test_slow_pod_delays_no_other(tmp_path: Path) -> None:
    """One pod does not answer. Others are found and bound, and the reports go on."""
    async with running_pools(tmp_path) as it:
        it.cluster.set_pool_ready("small")
        it.pods.pods[control_url("s1")] = Pod(may_answer=asyncio.Event())
        it.pod("s1").may_answer.clear()
        await it.register()
        await it.park_pods("small", "s1")
        await it.read_feed()
        await it.report_load()
        await it.let_pass(2)
        assert await shares(it) == {"small-00001": 3.0}
        await it.park_pods("small", "s1", "s2")
        assert it.states() == {"s1": PodState.UNKNOWN, "s2": PodState.BINDING}
        assert it.pools.count_pods() == {
            ("small", "wanted"): 3, ("large", "wanted"): 1, ("small", "unknown"): 1, ("small", "binding"): 1,
        }  # fmt: skip
        it.pod("s1").may_answer.set()
        await it.let_pass(2)
        assert it.states()["s1"] is PodState.PARKED


async def test_refused_deletion_cost_is_retried_and_rarely_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise each pod of a large pool would log a line each second."""
    async with running_pools(tmp_path) as it:
        it.cluster.refuse[Ref("v1", "Pod", POOLS, "s1")] = deque([Denied("forbidden")] * 60)
        await it.park_pods("small", "s1")
        await it.let_pass(100)
        assert it.cluster.cost("s1") == "0"
        reported = [record for record in caplog.records if "deletion cost" in record.message]
        assert [record.failures for record in reported] == [1, 2, 4, 8, 16, 32]  # type: ignore[attr-defined]


async def test_terminating_pod_takes_no_version_again(tmp_path: Path) -> None:
    """Its version goes to another pod."""
    async with running_pools(tmp_path) as it:
        await it.register()
        await it.park_pods("small", "s1", "s2")
        await it.report_load()
        (name,) = [name for name, state in it.states().items() if state is PodState.BINDING]
        (other,) = {"s1", "s2"} - {name}
        it.cluster.pool("small", "s1", "s2", leaving=(name,))
        it.pod(name).restore_allowed.set()
        it.pod(other).restore_allowed.set()
        await it.let_pass(3)
        assert it.states() == {name: PodState.UNKNOWN, other: PodState.BOUND}


async def test_excluded_tenants_get_their_own_service(tmp_path: Path) -> None:
    """So does a version that is too large for every pod."""
    async with running_pools(tmp_path) as it:
        pooled_models = it.pools.pooled_models
        of = registration("m")
        await it.register()
        (model,) = it.registry.all_models()
        (version,) = model.versions
        assert pooled_models.is_pooled(model, version)
        assert not pooled_models.is_pooled(replace(model, tenant="secretive"), version)
        too_large = replace(version, registration=msgspec.structs.replace(of, total_bytes=50_001))
        assert not pooled_models.is_pooled(model, too_large)


async def test_pooled_version_counts_as_ready(tmp_path: Path) -> None:
    """A version that is too large for the pools has its own Service. That Service goes when a pooled version replaces
    it.
    """
    async with running_pools(tmp_path) as it:
        large = msgspec.structs.replace(registration("m"), total_bytes=60_000)
        await it.registry.register(large, NOW_S)
        await it.let_pass(3)
        assert any(name.startswith("m-") for name in it.cluster.services())
        await it.register("b")
        await it.deploy("b")
        await it.let_pass(3)
        assert not any(name.startswith("m-") for name in it.cluster.services())


async def test_stopped_version_releases_its_pod(tmp_path: Path) -> None:
    """A stop reaches the autoscaler of the pools at once. The version is still registered."""
    async with running_pools(tmp_path) as it:
        await it.register()
        await it.park_pods("small", "s1")
        it.pod("s1").restore_allowed.set()
        await it.report_load()
        assert it.states() == {"s1": PodState.BOUND}
        it.controller.stop((key(),))
        await it.let_pass(5)
        assert ("release", control_url("s1")) in it.pods.calls


async def test_deleted_version_releases_its_pod(tmp_path: Path) -> None:
    """Its replica leaves the feed, and its pod waits for another version. A late request starts nothing."""
    async with running_pools(tmp_path) as it:
        await it.register()
        await it.park_pods("small", "s1")
        it.pod("s1").restore_allowed.set()
        await it.report_load()
        assert it.states() == {"s1": PodState.BOUND}
        (replica,) = it.table.replicas_of(key())
        await it.read_feed()
        it.controller.stop(await it.registry.delete_model(BY, TENANT, "m", NOW_S, it.table.is_present, force=True))
        await it.let_pass(5)
        assert ("release", control_url("s1")) in it.pods.calls
        assert [name for line in await it.read_feed() for name in line.removed_replicas] == [replica.runtime_id]
        await it.report_load()
        assert it.states() == {"s1": PodState.PARKED}
