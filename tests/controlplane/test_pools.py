"""Versions on pods that wait, in a cluster in memory: who is told what, what is found, what comes of cuts."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from contracts.control import ReplicaRow, RestoreFailure
from contracts.errors import NotFound, Refused, Unavailable
from contracts.jobs import Take
from controlplane.facts import VersionKey
from controlplane.policy.scale_settings import ScaleSettings
from controlplane.scaling.knative.pool_actuator import START_S
from controlplane.scaling.knative.pool_pods import PodState
from controlplane.tenants import insert_tenant
from tests.controlplane.builders import BY, NOW_S, TENANT, digest, key, registration, stats
from tests.controlplane.plane_scene import CLUSTER
from tests.controlplane.pool_stage import Pod, Pods, Stage, address, orders, staged


def test_a_version_is_bound_and_released(tmp_path: Path) -> None:
    """No Service of its own, a pod that fits best; told when it serves, worth more than those that wait; released when
    it is idle, activators first, and told of its end once another life waits there.
    """

    async def scenario(stage: Stage) -> None:
        assert stage.ground.services() == {"kelvin-pool--small", "kelvin-pool--large"}
        await stage.register()
        await stage.register("other")
        await stage.scene.passes(3)
        assert not any(name.startswith("m-") for name in stage.ground.services())
        assert any(name.startswith("other-") for name in stage.ground.services()), "the control: that one has its own"
        await stage.run("large", "l1")
        await stage.run("small", "s1")
        await stage.heard()
        await stage.ask()
        assert stage.states() == {"l1": PodState.PARKED, "s1": PodState.BINDING}
        assert stage.pod("s1").take == Take(
            tenant=TENANT, model="m", version=digest("a"), device_class="cpu-1", store=CLUSTER.store_url,
            weight_bytes=4096,
        )  # fmt: skip
        assert not any(line.replicas for line in await stage.heard())
        stage.pod("s1").goes_on.set()
        await stage.scene.passes(2)
        (row,) = [row for line in await stage.heard() for row in line.replicas]
        assert (row.url, row.max_streams, row.model) == (f"http://{address('s1')}:8012", 4, "m")
        assert (stage.ground.cost("s1"), stage.ground.cost("l1")) == ("1000", "0")
        assert [each.runtime_id for each in stage.scene.table.of(key())] == [row.runtime_id]

        stage.scene.plane.observe(stats(key(), 0.0, 0))
        await stage.scene.passes(200)
        lines = await stage.heard()
        assert [each.draining for line in lines for each in line.replicas] == [True]
        assert [name for line in lines for name in line.removed_replicas] == [row.runtime_id]
        assert stage.pods.told[-1] == ("release", orders("s1"))
        assert stage.states()["s1"] is PodState.PARKED
        assert stage.ground.cost("s1") == "0"
        assert not stage.scene.table.of(key())

    staged(tmp_path, scenario)


@pytest.mark.parametrize("idle", ["auto", "sleep", "warm"])
def test_idle_setting_of_one_machine_holds_no_pod(tmp_path: Path, idle: str) -> None:
    """A database that one machine used may hold it. A cluster refuses it, and scales to zero."""

    async def scenario(stage: Stage) -> None:
        await stage.register()
        await stage.scene.registry.rescale(BY, TENANT, "m", {"idle": idle}, NOW_S)
        await stage.run("small", "s1")
        await stage.ask()
        stage.pod("s1").goes_on.set()
        await stage.scene.passes(2)
        assert stage.states() == {"s1": PodState.BOUND}
        stage.scene.plane.observe(stats(key(), 0.0, 0))
        await stage.scene.passes(200)
        assert stage.states() == {"s1": PodState.PARKED}

    staged(tmp_path, scenario)


def test_what_is_reported(tmp_path: Path) -> None:
    """Pods that are taken, starts that wait, and the buffer; each reader's share of it."""

    async def scenario(stage: Stage) -> None:
        for each in ("small", "large"):
            stage.ground.revised(each)
        await stage.register()
        await stage.scene.registry.rescale(BY, TENANT, "m", {"max": 8}, NOW_S)
        await stage.scene.passes(2)
        assert await shares(stage) == {"small-00001": 2.0, "large-00001": 1.0}
        await stage.ask()
        await stage.scene.passes(2)
        assert await shares(stage) == {"small-00001": 3.0, "large-00001": 1.0}, "one waits"
        await stage.run("small", "s1")
        stage.pod("s1").goes_on.set()
        await stage.scene.passes(2)
        assert await shares(stage) == {}, "it is taken: as many are wanted"
        with stage.scene.feed.subscribe():
            await stage.scene.passes(2)
            assert await shares(stage) == {"small-00001": 1.5, "large-00001": 0.5}
            assert [row.wanted for row in stage.scene.feed.snapshot().pools] == [1, 3]

    staged(tmp_path, scenario)


async def shares(stage: Stage) -> dict[str, float]:
    """As they were told last, since the last look."""
    return {row.name: row.share for line in await stage.heard() for row in line.pools}


def test_nobody_waits(tmp_path: Path) -> None:
    """A start takes the first pod that comes; without any it fails in time, and who waits is told."""

    async def scenario(stage: Stage) -> None:
        await stage.register()
        await stage.ask()
        await stage.run("small", "s1")
        assert stage.states() == {"s1": PodState.BINDING}
        stage.pod("s1").goes_on.set()
        await stage.run("small")
        await stage.register("n")
        await stage.heard()
        waited_s = 0
        while not (told := await failures(stage)):
            assert waited_s <= START_S + 60
            await stage.ask(model="n")
            await stage.scene.passes(30)
            waited_s += 30
        assert waited_s >= START_S
        assert {each.code for each in told} == {"start_failed"}

    staged(tmp_path, scenario)


async def failures(stage: Stage) -> list[RestoreFailure]:
    return [failure for line in await stage.heard() for failure in line.failures]


@pytest.mark.parametrize(
    ("failure", "binds", "told"),
    [
        pytest.param(NotFound("version", "x"), 1, ["not_found"], id="it says why: who waits is told"),
        pytest.param(Unavailable("the pod"), 3, ["unavailable"], id="it is lost, three times"),
    ],
)
def test_a_bind_fails(tmp_path: Path, failure: NotFound | Unavailable, binds: int, told: list[str]) -> None:
    """On one pod, or on as many as are tried."""

    async def scenario(stage: Stage) -> None:
        await stage.register()
        await stage.run("small", "s1", "s2", "s3", "s4")
        for name in ("s1", "s2", "s3", "s4"):
            stage.pod(name).fails = Refused(failure)
            stage.pod(name).goes_on.set()
        await stage.heard()
        await stage.ask()
        assert len([what for what, _ in stage.pods.told if what == "bind"]) == binds
        assert [each.code for each in await failures(stage)] == told

    staged(tmp_path, scenario)


def test_the_next_control_plane_goes_on(tmp_path: Path) -> None:
    """What an earlier one had bound, or was about to, is found and told; what nobody knows is released. All of it
    before activators are told what there is.
    """
    pods = Pods()
    ours = Take(
        tenant=TENANT, model="m", version=digest("a"), device_class="cpu-1", store=CLUSTER.store_url, weight_bytes=4096
    )
    pods.pods[orders("s1")] = Pod(take=ours, is_ready=True)
    pods.pods[orders("s2")] = Pod(take=ours)
    pods.pods[orders("s3")] = Pod(take=msgspec.structs.replace(ours, version=digest("f")), is_ready=True)
    for pod in pods.pods.values():
        pod.goes_on.set()

    async def scenario(stage: Stage) -> None:
        await stage.register()
        await stage.scene.registry.rescale(BY, TENANT, "m", {"max": 8, "min": 2}, NOW_S)
        await stage.run("small", "s1", "s2", "s3")
        found = stage.states()
        assert (found["s1"], found["s2"]) == (PodState.BOUND, PodState.BOUND)
        assert len(stage.scene.table.of(key())) == 2
        await stage.scene.passes(3)
        assert ("release", orders("s3")) in pods.told
        assert stage.states()["s3"] is PodState.PARKED

    staged(tmp_path, scenario, pods)


def test_version_that_waits_for_a_pod_says_so(tmp_path: Path) -> None:
    """Until it has one."""

    async def scenario(stage: Stage) -> None:
        await stage.register()
        await stage.ask()
        await stage.scene.passes(2)
        (row,) = stage.scene.feed.snapshot().start_problems
        assert (row.problem.reason, row.problem) == ("no_room", stage.scene.outcomes.problem(key()))
        await stage.run("small", "s1")
        stage.pod("s1").goes_on.set()
        await stage.scene.passes(2)
        assert stage.scene.feed.snapshot().start_problems == ()

    staged(tmp_path, scenario)


EVERY_POD = {"small": tuple(f"s{n}" for n in range(8)), "large": tuple(f"l{n}" for n in range(4))}


def test_minimum_takes_no_more_than_a_share_of_the_pods_while_another_tenant_waits(tmp_path: Path) -> None:
    """One tenant's minimum holds all 12 pods. The first request of another tenant gets one of them."""
    guest = VersionKey("guest", "n", digest("b"))

    async def scenario(stage: Stage) -> None:
        for name in (each for names in EVERY_POD.values() for each in names):
            stage.pods.pods[orders(name)] = Pod()
            stage.pods.pods[orders(name)].goes_on.set()
        await stage.register()
        with pytest.raises(Refused, match="12 device slots"):
            stage.scene.plane.check_scale(stage.scene.registry.model(TENANT, "m"), ScaleSettings(min=13, max=20))
        await stage.scene.registry.rescale(BY, TENANT, "m", {"min": 12, "max": 20}, NOW_S)
        for pool, names in EVERY_POD.items():
            await stage.run(pool, *names)
        await stage.scene.passes(70)  # a stable window after the takeover
        assert list(stage.states().values()) == [PodState.BOUND] * 12

        await stage.scene.registry._database.write(lambda connection: insert_tenant(connection, BY, "guest", NOW_S))
        await stage.scene.registry.register(registration("n", "b", tenant="guest"), NOW_S)
        stage.scene.plane.observe(stats(guest))
        assert stage.scene.outcomes.problem(guest) is not None, "it says that it waits for a pod"
        for _ in range(40):
            stage.scene.plane.observe(stats(guest))
            await stage.scene.passes(1)
        assert len(stage.scene.table.of(guest)) == 1
        assert len(stage.scene.table.of(key())) == 11, "no more than one was taken"
        assert stage.scene.outcomes.problem(guest) is None

    staged(tmp_path, scenario)


def test_minimum_of_a_model_on_pools_is_within_its_share_of_the_devices_too(tmp_path: Path) -> None:
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

    async def scenario(stage: Stage) -> None:
        await stage.register()
        stage.scene.table.put(other)
        with pytest.raises(Refused, match="share of 4 device slots is 2"):
            stage.scene.plane.check_scale(stage.scene.registry.model(TENANT, "m"), ScaleSettings(min=3, max=20))

    staged(tmp_path, scenario, devices=4)


def test_takeover_releases_no_busy_pod(tmp_path: Path) -> None:
    """Three pods serve when another control plane begins: none is released before a stable window has passed, whoever
    has reported until then, and all that are used stay after it.
    """
    pods = Pods()
    ours = Take(
        tenant=TENANT, model="m", version=digest("a"), device_class="cpu-1", store=CLUSTER.store_url, weight_bytes=4096
    )
    for name in ("s1", "s2", "s3"):
        pods.pods[orders(name)] = Pod(take=ours, is_ready=True)
        pods.pods[orders(name)].goes_on.set()

    async def scenario(stage: Stage) -> None:
        await stage.register()
        await stage.scene.registry.rescale(BY, TENANT, "m", {"max": 8}, NOW_S)
        await stage.run("small", "s1", "s2", "s3")
        for _ in range(50):
            await stage.ask(concurrency=1.0)
            await stage.scene.passes(1)
        assert not [what for what in pods.told if what[0] == "release"]
        assert set(stage.states().values()) == {PodState.BOUND}
        for _ in range(100):
            await stage.ask(concurrency=1.0)
            await stage.scene.passes(1)
        assert list(stage.states().values()).count(PodState.BOUND) == 1

    staged(tmp_path, scenario, pods)


def test_pods_that_die(tmp_path: Path) -> None:
    """Another life in the pod of one that served is seen, and made up for; a pod that the cluster ends takes nothing
    more, and one that is gone is told of. One that is silent serves on.
    """

    async def scenario(stage: Stage) -> None:
        await stage.register()
        await stage.run("small", "s1", "s2")
        for name in ("s1", "s2"):
            stage.pod(name).goes_on.set()
        await stage.ask()
        (name,) = [name for name, state in stage.states().items() if state is PodState.BOUND]
        (first,) = stage.scene.table.of(key())
        stage.pod(name).is_deaf = True
        await stage.scene.passes(10)
        assert stage.scene.table.of(key()) == (first,), "silence is no death"
        stage.pod(name).is_deaf = False
        stage.pod(name).take, stage.pod(name).life = None, 7
        await stage.ask()
        await stage.scene.passes(10)
        (second,) = stage.scene.table.of(key())
        assert second.runtime_id != first.runtime_id

        (name,) = [name for name, state in stage.states().items() if state is PodState.BOUND]
        (other,) = {"s1", "s2"} - {name}
        await stage.heard()
        stage.ground.pool("small", "s1", "s2", leaving=(name,))
        await stage.ask()
        assert next(row.draining for line in await stage.heard() for row in line.replicas)
        stage.ground.pool("small", other)
        await stage.scene.passes(3)
        assert set(stage.states()) == {other}

    staged(tmp_path, scenario)


def test_pod_that_comes_back_at_another_address_is_another_pod(tmp_path: Path) -> None:
    """After its node has booted again it keeps its name. What it served is lost, and it is asked where it is now."""

    async def scenario(stage: Stage) -> None:
        await stage.register()
        await stage.run("small", "s1")
        stage.pod("s1").goes_on.set()
        await stage.ask()
        (before,) = stage.scene.table.of(key())
        await stage.heard()
        stage.pod("s1").is_deaf = True  # nobody is at its old address
        stage.pods.pods[orders("s9")] = Pod(life=2)
        stage.pod("s9").goes_on.set()
        stage.ground.pool("small", "s1", moved={"s1": "s9"})
        await stage.scene.passes(3)
        assert before.runtime_id in [name for line in await stage.heard() for name in line.removed_replicas]
        await stage.ask()
        await stage.scene.passes(3)
        (after,) = stage.scene.table.of(key())
        assert after.url == f"http://{address('s9')}:8012"

    staged(tmp_path, scenario)


def test_who_answers_late_holds_up_nobody(tmp_path: Path) -> None:
    """A pod that says nothing: others are found and bound, and what is reported is as it is."""

    async def scenario(stage: Stage) -> None:
        stage.ground.revised("small")
        stage.pods.pods[orders("s1")] = Pod(says=asyncio.Event())
        stage.pod("s1").says.clear()
        await stage.register()
        await stage.run("small", "s1")
        await stage.heard()
        await stage.ask()
        await stage.scene.passes(2)
        assert await shares(stage) == {"small-00001": 3.0}
        await stage.run("small", "s1", "s2")
        assert stage.states() == {"s1": PodState.UNKNOWN, "s2": PodState.BINDING}
        assert stage.scene.pools.counts() == {
            ("small", "wanted"): 3, ("large", "wanted"): 1, ("small", "unknown"): 1, ("small", "binding"): 1,
        }  # fmt: skip
        stage.pod("s1").says.set()
        await stage.scene.passes(2)
        assert stage.states()["s1"] is PodState.PARKED

    staged(tmp_path, scenario)


def test_a_pod_that_ends_while_it_is_bound(tmp_path: Path) -> None:
    """Its version goes to another one, and it takes none again."""

    async def scenario(stage: Stage) -> None:
        await stage.register()
        await stage.run("small", "s1", "s2")
        await stage.ask()
        (name,) = [name for name, state in stage.states().items() if state is PodState.BINDING]
        (other,) = {"s1", "s2"} - {name}
        stage.ground.pool("small", "s1", "s2", leaving=(name,))
        stage.pod(name).goes_on.set()
        stage.pod(other).goes_on.set()
        await stage.scene.passes(3)
        assert stage.states() == {name: PodState.UNKNOWN, other: PodState.BOUND}

    staged(tmp_path, scenario)


def test_never_with_others(tmp_path: Path) -> None:
    """A tenant that is apart, and a version that fits no pod, have a Service of their own."""

    async def scenario(stage: Stage) -> None:
        shared = stage.scene.pools.shared
        of = registration("m")
        await stage.register()
        (model,) = stage.scene.registry.every_model()
        (version,) = model.versions
        assert shared.takes(model, version)
        assert not shared.takes(replace(model, tenant="secretive"), version)
        too_large = replace(version, registration=msgspec.structs.replace(of, total_bytes=50_001))
        assert not shared.takes(model, too_large)

    staged(tmp_path, scenario)


def test_what_shares_pods_is_waited_for_by_none(tmp_path: Path) -> None:
    """A version with a Service of its own, as it is too large, goes when one that shares pods takes its place."""

    async def scenario(stage: Stage) -> None:
        large = msgspec.structs.replace(registration("m"), total_bytes=60_000)
        await stage.scene.registry.register(large, NOW_S)
        await stage.scene.passes(3)
        assert any(name.startswith("m-") for name in stage.ground.services())
        await stage.register("m", "b")
        await stage.scene.deploy("b")
        await stage.scene.passes(3)
        assert not any(name.startswith("m-") for name in stage.ground.services())

    staged(tmp_path, scenario)


def test_a_deleted_version_lets_go(tmp_path: Path) -> None:
    """And a suspended tenant's."""

    async def scenario(stage: Stage) -> None:
        await stage.register()
        await stage.run("small", "s1")
        stage.pod("s1").goes_on.set()
        await stage.ask()
        assert stage.states() == {"s1": PodState.BOUND}
        stage.scene.plane.stop((key(),))
        await stage.scene.passes(5)
        assert stage.states() == {"s1": PodState.PARKED}

    staged(tmp_path, scenario)
