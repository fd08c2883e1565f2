"""Rollout: a new image reaches the versions of a cluster in waves. An operator's change of a version is written at
once.
"""

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from controlplane.knative.apply.cluster import Invalid, Json, Ref, Unreachable
from controlplane.knative.policy.apply_steps import with_digest
from controlplane.knative.policy.knative_service import (
    SERVICE_API,
    ZERO_INITIAL_SCALE,
    ClusterSpec,
    PodVersion,
    render_service,
)
from controlplane.knative.policy.object_labels import RENDERING
from controlplane.knative.policy.rollout_waves import FAILURE_PAUSES, WAVE_SIZE, ImageBehind
from controlplane.knative.services import service_renderer as wanted_services
from controlplane.knative.services.pods import PodTable
from controlplane.knative.services.rollout import Rollout
from controlplane.registry.feed_hub import FeedHub
from controlplane.tasks import Tasks
from kelvin.contracts.serving.control_messages import ReplicaRow
from tests.controlplane.builders import BY, NOW_S, TENANT, digest, key, opened_registry, registration
from tests.controlplane.knative.controller_fixture import (
    CLUSTER,
    NAMESPACE,
    ControllerScenario,
    FakeKnativeCluster,
    at,
    deliver_at_once,
    running_controller,
)
from tests.controlplane.knative.fake_cluster import running_loop
from tests.controlplane.virtual_time import VirtualClock

OLD = replace(CLUSTER, features=frozenset({ZERO_INITIAL_SCALE}))
NEW = replace(OLD, image="registry.example/kelvin@sha256:" + "1" * 64)
MIN, MAX = (f"autoscaling.knative.dev/{name}-scale" for name in ("min", "max"))
INITIAL = "autoscaling.knative.dev/initial-scale"


def ref_of(model: str) -> Ref:
    return at("a", model)


class FakeServices(FakeKnativeCluster):
    """Models `m00`, `m01`, ... with one version each. The test plays Knative and starts Revisions."""

    def __init__(self, clock: VirtualClock, models: int) -> None:
        super().__init__()
        self._clock = clock
        self.models = [f"m{number:02}" for number in range(models)]

    def image(self, model: str) -> str:
        image: str = self._template(model)["spec"]["containers"][0]["image"]
        return image

    def notes(self, model: str) -> dict[str, str]:
        """Return the annotations of the template."""
        notes: dict[str, str] = self._template(model)["metadata"]["annotations"]
        return notes

    def _template(self, model: str) -> Any:
        return self.objects[ref_of(model)]["spec"]["template"]

    def images(self) -> Counter[str]:
        return Counter(self.image(model) for model in self.models)

    def with_new(self) -> list[str]:
        return [model for model in self.models if self.image(model) == NEW.image]

    def generation(self, model: str) -> int:
        """Return how many Revisions were created."""
        generation: int = self.objects[ref_of(model)]["metadata"]["generation"]
        return generation

    def becomes(self, model: str, status: str) -> None:
        """Set the newest Revision to `True`, `False` or `Unknown`."""
        obj = self.objects[ref_of(model)]
        name, generation = ref_of(model).name, obj["metadata"]["generation"]
        before = (obj.get("status") or {}).get("latestReadyRevisionName", "")
        now = datetime.fromtimestamp(self._clock.wall_s(), UTC).isoformat()
        newest = f"{name}-{generation:05}"
        condition = {"type": "ConfigurationsReady", "status": status, "lastTransitionTime": now}
        self.put({**obj, "status": {
            "observedGeneration": generation,
            "latestCreatedRevisionName": newest,
            "latestReadyRevisionName": newest if status == "True" else before,
            "conditions": [condition],
        }})  # fmt: skip
        if status == "False":
            reason = {"type": "Ready", "status": "False", "reason": "ImagePullBackOff", "lastTransitionTime": now}
            self._put(SERVICE_API, "Revision", newest, status={"conditions": [reason]})

    def starting(self) -> list[str]:
        """Return the models whose newest Revision has no status yet. A Revision with initial scale zero becomes ready
        at once.
        """
        found = []
        for model in self.models:
            obj = self.objects[ref_of(model)]
            if (obj.get("status") or {}).get("observedGeneration") != obj["metadata"]["generation"]:
                if self.notes(model).get(INITIAL) == "0":
                    self.becomes(model, "True")
                else:
                    found.append(model)
        return found

    def runs(self, *models: str) -> None:
        """Give these models a ready pod."""
        for model in models:
            self.pods("a", model=model, **{f"{model}-pod": True})  # type: ignore[arg-type]

    async def starts_all(self, scene: ControllerScenario) -> int:
        """Make every Revision ready until no new one appears. Return the most that started at a time."""
        most, quiet = 0, 0
        while quiet < 2:
            before = {model: self.generation(model) for model in self.models}
            starting = self.starting()
            most = max(most, len(starting))
            for model in starting:
                self.becomes(model, "True")
            await scene.let_pass(10)
            quiet = 0 if starting or before != {model: self.generation(model) for model in self.models} else quiet + 1
        return most


Lead = Callable[[ClusterSpec], AbstractAsyncContextManager[ControllerScenario]]


@asynccontextmanager
async def fleet(path: Path, models: int) -> AsyncIterator[tuple[FakeServices, Lead]]:
    """Yield a cluster whose models are ready with the old image, and `lead`, which runs a control plane on it."""
    clock, feed = VirtualClock(), FeedHub()
    feed.wait_until_delivered = deliver_at_once  # type: ignore[method-assign]
    place = FakeServices(clock, models)
    async with opened_registry(path, feed) as registry, Tasks() as tasks:

        @asynccontextmanager
        async def lead(spec: ClusterSpec) -> AsyncIterator[ControllerScenario]:
            scene = ControllerScenario(place, registry, feed, clock, tasks, spec=spec)
            async with running_loop(scene.controller):
                await scene.let_pass(10)
                yield scene

        async with lead(OLD) as scene:
            for model in place.models:
                await registry.register(registration(model), NOW_S)
            await scene.let_pass(10)
            await place.starts_all(scene)
            assert place.starting() == []
        place.calls.clear()
        place.writes.clear()
        yield place, lead
    assert place.open_watches == []


def behind(scene: ControllerScenario, model: str) -> ImageBehind | None:
    return scene.outcomes.images_behind.get(key(model))


async def test_new_image_goes_to_one_version_first(tmp_path: Path) -> None:
    """Of 50 versions one with a pod is written first. The others say why they are behind, and follow in waves once its
    Revision is ready.
    """
    async with fleet(tmp_path, 50) as (place, lead):
        place.runs("m17", *place.models[20:])
        async with lead(NEW) as scene:
            await scene.let_pass(600)
            assert place.writes == [ref_of("m17")]
            assert place.with_new() == ["m17"]
            waits = behind(scene, "m03")
            assert waits is not None
            assert (waits.reason, waits.message) == (
                "waiting", "it waits until a first replica with the new image is ready",
            )  # fmt: skip
            assert NOW_S < waits.since_s < scene.clock.wall_s() - 500
            canary = behind(scene, "m17")
            assert canary is not None
            assert canary.reason == "starting"
            assert len(scene.outcomes.images_behind) == 50
            place.becomes("m17", "True")
            await scene.let_pass(2)
            assert 1 < len(place.with_new()) <= 1 + WAVE_SIZE
            assert 1 < await place.starts_all(scene) <= WAVE_SIZE
            assert place.images() == {NEW.image: 50}
            assert scene.outcomes.images_behind == {}
            assert {place.generation(model) for model in place.models} == {2}


async def test_idle_versions_are_rolled_without_a_pod(tmp_path: Path) -> None:
    """This begins once a pod has proven the image. A version with pods, or with a minimum, starts the new pod first."""
    async with fleet(tmp_path, 9) as (place, lead):
        place.runs("m01", "m02")
        async with lead(NEW) as scene:
            assert await place.starts_all(scene) == 1
            assert place.images() == {NEW.image: 9}
            initial = {model: place.notes(model).get(INITIAL) for model in place.models}
            assert initial == {model: None if model in ("m01", "m02") else "0" for model in place.models}
            # The choice stays, since another choice would create another Revision.
            place.runs(*place.models)
            await scene.let_pass(600)
            assert {place.generation(model) for model in place.models} == {2}
        async with lead(NEW) as scene:
            await scene.let_pass(600)
            assert {place.generation(model) for model in place.models} == {2}


async def test_all_idle_versions_start_one_pod(tmp_path: Path) -> None:
    """A Revision without a pod proves nothing, and a broken image must not reach all versions."""
    async with fleet(tmp_path, 9) as (place, lead), lead(NEW) as scene:
        assert place.with_new() == ["m00"]
        assert INITIAL not in place.notes("m00")
        assert await place.starts_all(scene) == 1
        assert place.images() == {NEW.image: 9}


async def test_initial_scale_is_omitted_where_not_allowed(tmp_path: Path) -> None:
    """Idle versions then start a pod each, in waves."""
    without = replace(NEW, features=frozenset[str]())
    async with fleet(tmp_path, 9) as (place, lead), lead(without) as scene:
        assert await place.starts_all(scene) == WAVE_SIZE
        assert all(INITIAL not in place.notes(model) for model in place.models)
        assert place.images() == {NEW.image: 9}


async def test_failing_canary_stops_the_others(tmp_path: Path) -> None:
    """They keep the old image and say so. Another canary is tried after a pause, and the next after twice the pause."""
    async with fleet(tmp_path, 9) as (place, lead):
        place.runs(*place.models)
        async with lead(NEW) as scene:
            place.becomes("m00", "False")
            await scene.let_pass(10)
            failed, waits = behind(scene, "m00"), behind(scene, "m07")
            assert failed is not None
            assert waits is not None
            assert (failed.reason, failed.message) == (
                "failed", "its new revision did not start: its image can't be pulled; the previous one serves",
            )  # fmt: skip
            assert (waits.reason, waits.message) == (
                "waiting", "it waits: the new image did not start for another version, and is tried again later",
            )  # fmt: skip
            await scene.let_pass(FAILURE_PAUSES.first_s - 60)
            assert place.with_new() == ["m00"]
            await scene.let_pass(90)
            assert place.with_new() == ["m00", "m01"]
            place.becomes("m01", "False")
            await scene.let_pass(2 * FAILURE_PAUSES.first_s - 60)
            assert place.with_new() == ["m00", "m01"]
            await scene.let_pass(FAILURE_PAUSES.first_s * 4)
            assert place.with_new() == ["m00", "m01", "m02"]


async def test_one_versions_failure_stops_no_other_for_good(tmp_path: Path) -> None:
    """Another version proves the image. The rest follow after the pause, and the failed one is tried again."""
    async with fleet(tmp_path, 20) as (place, lead):
        place.runs(*place.models)
        async with lead(NEW) as scene:
            place.becomes("m00", "False")
            await scene.let_pass(2 * FAILURE_PAUSES.first_s)
            assert place.with_new() == ["m00", "m01"]
            assert 1 < await place.starts_all(scene) < WAVE_SIZE
            assert place.images() == {NEW.image: 20}
            assert place.generation("m00") == 3
            assert scene.outcomes.images_behind == {}
            await scene.let_pass(2 * FAILURE_PAUSES.longest_s)
            assert place.generation("m00") == 3


async def test_another_image_starts_anew_after_a_failure(tmp_path: Path) -> None:
    """It starts at once with another version. The one that failed with the bad image comes last."""
    fixed = replace(NEW, image="registry.example/kelvin@sha256:" + "2" * 64)
    async with fleet(tmp_path, 9) as (place, lead):
        place.runs(*place.models)
        async with lead(NEW) as scene:
            place.becomes("m00", "False")
            await scene.let_pass(10)
        async with lead(fixed) as scene:
            assert place.images() == {OLD.image: 7, NEW.image: 1, fixed.image: 1}
            assert place.image("m01") == fixed.image
            await place.starts_all(scene)
            assert place.images() == {fixed.image: 9}
            assert scene.outcomes.images_behind == {}


@pytest.mark.parametrize("canary", ["Unknown", "False"])
async def test_takeover_goes_on_with_the_wave(tmp_path: Path, canary: str) -> None:
    """A new control plane writes no second canary while the first one starts, or right after it failed."""
    async with fleet(tmp_path, 9) as (place, lead):
        place.runs(*place.models)
        async with lead(NEW):
            place.becomes("m00", canary)
        async with lead(NEW) as scene:
            await scene.let_pass(300)
            assert place.with_new() == ["m00"]
            assert place.generation("m00") == 2
            place.becomes("m00", "True")
            await scene.let_pass(10)
            await place.starts_all(scene)
            assert place.images() == {NEW.image: 9}


async def test_takeover_in_a_wave_exceeds_no_wave(tmp_path: Path) -> None:
    """Revisions that the previous leader started count."""
    async with fleet(tmp_path, 20) as (place, lead):
        place.runs(*place.models)
        async with lead(NEW) as scene:
            place.becomes("m00", "True")
            await scene.let_pass(10)
            assert len(place.starting()) == WAVE_SIZE
            place.becomes(place.starting()[0], "True")
        async with lead(NEW) as scene:
            await scene.let_pass(60)
            assert len(place.starting()) == WAVE_SIZE


async def test_scale_is_written_at_once_and_with_the_old_image(tmp_path: Path) -> None:
    """The change of scale does not wait for a wave, and does not bring the unproven image."""
    async with fleet(tmp_path, 9) as (place, lead):
        place.runs(*place.models)
        async with lead(NEW) as scene:
            await scene.registry.rescale(BY, TENANT, "m05", {"max": 4}, NOW_S)
            await scene.let_pass(10)
            assert (place.notes("m05")[MAX], place.image("m05")) == ("4", OLD.image)
            assert place.generation("m05") == 2
            assert place.with_new() == ["m00"]
            place.becomes("m05", "True")
            # A new leader leaves it, and later rolls it with the present scale.
        async with lead(NEW) as scene:
            await scene.let_pass(60)
            assert place.generation("m05") == 2
            place.becomes("m00", "True")
            await scene.let_pass(10)
            await place.starts_all(scene)
            assert (place.notes("m05")[MAX], place.image("m05")) == ("4", NEW.image)


async def test_minimum_of_an_idle_version_starts_its_pod(tmp_path: Path) -> None:
    """This holds for a version rolled without a pod. Another change of scale starts none."""
    async with fleet(tmp_path, 9) as (place, lead), lead(NEW) as scene:
        await place.starts_all(scene)
        assert place.notes("m05")[INITIAL] == "0"
        await scene.registry.rescale(BY, TENANT, "m05", {"max": 4}, NOW_S)
        await scene.let_pass(10)
        assert (place.notes("m05")[MAX], place.notes("m05").get(INITIAL)) == ("4", "0")
        assert place.starting() == []
        await scene.registry.rescale(BY, TENANT, "m05", {"min": 1}, NOW_S)
        await scene.let_pass(10)
        assert (place.notes("m05")[MIN], place.notes("m05").get(INITIAL)) == ("1", None)


async def test_edit_of_a_version_that_waits_is_undone(tmp_path: Path) -> None:
    """It gets its old image back."""
    async with fleet(tmp_path, 9) as (place, lead):
        place.runs(*place.models)
        path = ("spec", "template", "spec", "containers", 0, "image")
        async with lead(NEW) as scene:
            place.edit(ref_of("m05"), path, "evil")
            await scene.let_pass(10)
            assert place.image("m05") == OLD.image


def unmarked(place: FakeServices) -> None:
    """Remove the rendering annotations, as an older build left them out."""
    for model in place.models:
        obj: Json = place.objects[ref_of(model)]
        del obj["metadata"]["annotations"][RENDERING]
        del obj["metadata"]["managedFields"][0]["fieldsV1"]["f:metadata"]["f:annotations"][f"f:{RENDERING}"]


@pytest.mark.parametrize("after", [pytest.param(NEW, id="another image"), pytest.param(OLD, id="the same image")])
async def test_first_upgrade_is_no_mass_change(tmp_path: Path, after: ClusterSpec) -> None:
    """The older build wrote no digest. Versions with an unchanged scale go in waves."""
    async with fleet(tmp_path, 9) as (place, lead):
        place.runs(*place.models)
        unmarked(place)
        async with lead(after) as scene:
            await scene.let_pass(60)
            if after == NEW:
                assert place.with_new() == ["m00"]
                place.becomes("m00", "True")
                await scene.let_pass(10)
            await place.starts_all(scene)
            assert place.images() == {after.image: 9}
            assert scene.outcomes.images_behind == {}
            assert {place.generation(model) for model in place.models} == {2 if after == NEW else 1}


async def test_version_that_never_was_ready_holds_up_no_roll_out(tmp_path: Path) -> None:
    """A new version that fails, or starts for long, says nothing about the image."""
    async with fleet(tmp_path, 9) as (place, lead):
        place.runs(*place.models)
        async with lead(NEW) as scene:
            for model in ("x0", "x1"):
                await scene.registry.register(registration(model), NOW_S)
            await scene.let_pass(10)
            place.becomes("x0", "False")
            await scene.let_pass(10)
            place.becomes("m00", "True")
            await scene.let_pass(10)
            await place.starts_all(scene)
            assert place.images() == {NEW.image: 9}


async def test_version_that_crashes_later_is_no_failed_roll_out(tmp_path: Path) -> None:
    """Its newest Revision was ready once, and no older one serves."""
    async with fleet(tmp_path, 9) as (place, lead):
        place.runs(*place.models)
        place.becomes("m08", "False")
        async with lead(OLD) as scene:
            await scene.let_pass(FAILURE_PAUSES.first_s * 4)
            assert {place.generation(model) for model in place.models} == {1}
            assert scene.outcomes.images_behind == {}


async def test_service_stays_while_it_cannot_be_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in rendering one version neither changes nor deletes its Service."""

    def defective(pod: PodVersion, cluster: ClusterSpec) -> Json:
        if pod.model == "m01":
            raise ValueError(pod.model)
        return render_service(pod, cluster)

    async with fleet(tmp_path, 3) as (place, lead):
        place.runs(*place.models)
        monkeypatch.setattr("controlplane.knative.services.service_renderer.render_service", defective)
        async with lead(OLD) as scene:
            await scene.let_pass(60)
            assert {place.generation(model) for model in place.models} == {1}
            assert scene.outcomes.problem(key("m01")) is not None
            await scene.registry.delete_model(BY, TENANT, "m01", NOW_S, scene.table.is_present, force=True)
            await scene.let_pass(10)
            assert [ref for name, ref in place.calls if name == "delete"] == [ref_of("m01")]


async def test_refused_canary_is_reported_and_pauses(tmp_path: Path) -> None:
    """The API server may refuse the same of all versions. An unreachable server is not a refusal."""
    async with fleet(tmp_path, 9) as (place, lead):
        place.runs(*place.models)
        what = f"denied: {INITIAL}=0 not allowed by cluster"
        place.refuse[ref_of("m00")] = deque([Unreachable("away"), *([Invalid(what)] * 1000)])
        async with lead(NEW) as scene:
            await scene.let_pass(300)
            assert (place.writes, place.with_new()) == ([], [])
            refused = behind(scene, "m00")
            assert refused is not None
            assert (refused.reason, refused.message) == (
                "refused",
                "the cluster does not take its new Service: Knative's config-autoscaler needs allow-zero-initial-scale",
            )
            await scene.let_pass(FAILURE_PAUSES.first_s)
            assert place.with_new() == ["m01"]
            place.refuse.clear()
            await scene.let_pass(600)
            assert place.with_new() == ["m00", "m01"]


async def test_unproven_roll_out_renders_nothing_again(tmp_path: Path) -> None:
    """Neither while a canary starts, nor when it becomes ready."""
    async with fleet(tmp_path, 9) as (place, lead):
        place.runs("m00")
        async with lead(NEW) as scene:
            renderings = 0
            republish_meanwhile = scene.registry.republish_meanwhile

            def counted() -> None:
                nonlocal renderings
                renderings += 1
                republish_meanwhile()

            scene.registry.republish_meanwhile = counted  # type: ignore[method-assign]
            await scene.let_pass(600)
            place.becomes("m00", "True")
            await scene.let_pass(10)
            assert len(place.with_new()) > 1
            assert renderings == 0


class CountedService(dict[str, Any]):
    """A Service that adds its name to `read` when a field is read."""

    def __init__(self, obj: Json, read: set[str]) -> None:
        super().__init__(obj)
        self._name, self._read = str(obj["metadata"]["name"]), read

    def __getitem__(self, key: str) -> Any:
        self._read.add(self._name)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(self._name)
        return super().get(key, default)


def test_pass_reads_only_services_that_changed() -> None:
    """Of 200 Services a pass reads those that became ready, got a pod or were rescaled, and no other."""
    read: set[str] = set()
    clock, names = VirtualClock(), [f"m{number:03}" for number in range(200)]
    places = {(NAMESPACE, ref_of(name).name): key(name) for name in names}
    seen: dict[Ref, Json] = {}

    def becomes(name: str, status: str, generation: int, cluster: ClusterSpec) -> None:
        obj = with_digest(rendered(name, cluster), "kelvin")
        about = {**obj["metadata"], "generation": generation}
        condition = {"type": "ConfigurationsReady", "status": status}
        status_of = {"observedGeneration": generation, "latestReadyRevisionName": "before", "conditions": [condition]}
        seen[ref_of(name)] = CountedService({**obj, "metadata": about, "status": status_of}, read)

    def rendered(name: str, cluster: ClusterSpec, scale: int = 1) -> Json:
        pod = PodVersion(
            tenant=TENANT, model=name, version=digest("a"), weight_bytes=1 << 30, kv_bytes=1 << 29, max_streams=8,
            min_scale=0, max_scale=scale, target=None, window_s=60, grace_s=30, average="linear",
        )  # fmt: skip
        return CountedService(render_service(pod, cluster), read)

    for name in names:
        becomes(name, "True", 1, OLD)
    pods = PodTable(clock, "cpu-1")
    rollout = Rollout(seen.get, lambda _: None, pods, clock, "kelvin", NEW.features)
    wanted = {name: rendered(name, NEW) for name in names}

    def names_read_in_a_pass() -> set[str]:
        read.clear()
        rollout.choose({})
        return set(read)

    rollout.set_rendered(wanted.values(), places)
    assert names_read_in_a_pass() == {ref_of(name).name for name in names}
    names_read_in_a_pass()  # the canary, which is due
    assert names_read_in_a_pass() == set()

    becomes("m000", "Unknown", 2, NEW)
    assert names_read_in_a_pass() == {ref_of("m000").name}
    assert names_read_in_a_pass() == set()

    pods.upsert(ReplicaRow("pod", TENANT, "m100", digest("a"), "", 8, draining=False, restore=()))
    assert names_read_in_a_pass() == {ref_of("m100").name}

    becomes("m000", "True", 2, NEW)
    assert names_read_in_a_pass() == {ref_of(name).name for name in ("m000", "m100", "m001", "m002", "m003", "m004")}
    assert names_read_in_a_pass() <= {ref_of(name).name for name in ("m000", "m100", "m001", "m002", "m003", "m004")}
    assert names_read_in_a_pass() == set()

    wanted["m150"] = rendered("m150", NEW, scale=2)
    rollout.set_rendered(wanted.values(), places)
    read.clear()
    assert rollout.choose({})
    assert read == {ref_of("m150").name}


UNREADABLE: list[Callable[[Json], Json]] = [
    lambda obj: {**obj, "status": {**obj["status"], "conditions": [None]}},
    lambda obj: {**obj, "status": "Ready"},
    lambda obj: {**obj, "spec": {"template": "none"}},
    lambda obj: {**obj, "metadata": {**obj["metadata"], "annotations": ["none"]}},
    lambda obj: {**obj, "metadata": {**obj["metadata"], "managedFields": [None]}},
]


@pytest.mark.parametrize("unreadable", UNREADABLE, ids=["conditions", "status", "template", "annotations", "managers"])
async def test_unreadable_service_affects_no_other(
    unreadable: Callable[[Json], Json], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays as it is, and status and log name it. Others get the new image, and it follows once it can be read."""
    async with fleet(tmp_path, 9) as (place, lead):
        ref = ref_of("m03")
        sound = place.objects[ref]
        place.put(unreadable(sound))
        left_alone = place.objects[ref]
        others = [model for model in place.models if model != "m03"]
        async with lead(NEW) as scene:
            for _ in range(20):
                await scene.let_pass(10)
                for model in others:
                    place.becomes(model, "True")
            assert {place.image(model) for model in others} == {NEW.image}
            assert place.objects[ref] == left_alone
            why = behind(scene, "m03")
            assert why is not None
            assert (why.reason, why.message) == (
                "unreadable",
                "its Service in the cluster can't be read; it stays as it is",
            )
            assert any(str(ref) in str(each.__dict__) for each in caplog.records)
            place.put({**sound, "metadata": {**sound["metadata"], "resourceVersion": None}})
            await place.starts_all(scene)
            assert place.images() == {NEW.image: 9}
            assert scene.outcomes.images_behind == {}


async def serve_bad_and_good(scene: ControllerScenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make two models ready. Afterwards the Service of `bad` can't be rendered."""
    for name in ("bad", "good"):
        await scene.registry.register(registration(name), NOW_S)
        await scene.registry.deploy(BY, TENANT, name, digest("a")[:12], NOW_S)
    await scene.let_pass()
    for name in ("bad", "good"):
        ready = f"{ref_of(name).name}-00001"
        scene.cluster.set_status(ref_of(name), "True", latestCreatedRevisionName=ready, latestReadyRevisionName=ready)
    await scene.let_pass()

    def broken(pod: PodVersion, cluster: ClusterSpec) -> dict[str, Any]:
        if pod.model == "bad":
            raise ZeroDivisionError
        return render_service(pod, cluster)

    monkeypatch.setattr(wanted_services, "render_service", broken)


async def test_unrenderable_version_keeps_its_service_after_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass ends with an error, and the roll-out continues before the next whole pass."""
    choose, errors = Rollout.choose, list[Exception]()

    def choose_after_errors(self: Rollout, refusals: Any) -> bool:
        if errors:
            raise errors.pop()
        return choose(self, refusals)

    async with running_controller(tmp_path) as scene:
        place = scene.cluster
        await serve_bad_and_good(scene, monkeypatch)
        monkeypatch.setattr(Rollout, "choose", choose_after_errors)
        errors.append(ZeroDivisionError())
        sound = place.objects[ref_of("good")]
        for name in ("bad", "good"):
            await scene.registry.rescale(BY, TENANT, name, {"max": 5}, NOW_S)
        await scene.let_pass()
        assert not errors
        place.put({**sound, "status": {**sound["status"], "latestReadyRevisionName": "other"}})
        for _ in range(10):
            await scene.let_pass(0.5)
            assert ref_of("bad") in place.objects


async def test_unrenderable_unreadable_service_affects_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays, and changes of another version are written."""
    async with running_controller(tmp_path) as scene:
        place = scene.cluster
        await serve_bad_and_good(scene, monkeypatch)
        before = place.objects[ref_of("bad")]
        place.put({**before, "metadata": {**before["metadata"], "managedFields": [None]}})
        for name in ("bad", "good"):
            await scene.registry.rescale(BY, TENANT, name, {"max": 6}, NOW_S)
        await scene.let_pass(10)
        assert place.objects[ref_of("good")]["spec"]["template"]["metadata"]["annotations"][MAX] == "6"
        assert ref_of("bad") in place.objects
