"""KnativeController on a cluster in memory: the Services that it writes, and what it publishes of their state."""

import asyncio
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.knative.apply.cluster import Denied, Invalid, Json, Ref, Unreachable, Upsert
from controlplane.knative.policy.knative_service import SERVICE_API, ControlEndpoints
from controlplane.knative.policy.namespace_requirements import NamespaceRequirements
from controlplane.knative.policy.object_labels import INSTALLATION, STREAMS, VERSION
from controlplane.knative.policy.object_status import Service, parse_service
from controlplane.knative.services.tenant_namespaces import TenantNamespaces
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.accounting.spending import SpendingRow, TokenPrices
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import Feed, ReplicaRow, TenantLimits, TenantRow
from tests.controlplane.builders import BY, NOW_S, TENANT, digest, key
from tests.controlplane.knative.controller_fixture import (
    CLUSTER,
    NAMESPACE,
    OVERLAP_S,
    ControllerScenario,
    FakeKnativeCluster,
    at,
    create_controller,
    running_controller,
)
from tests.controlplane.knative.fake_cluster import running_loop
from tests.controlplane.virtual_time import VirtualClock


async def test_service_follows_registration_to_deletion(tmp_path: Path) -> None:
    """The Service is written to the tenant's namespace; its revision and pods are in the feed. Deletion removes
    everything.
    """
    async with running_controller(tmp_path) as it:
        await it.register("a")
        assert it.cluster.services() == {at("a").name}
        await it.read_feed()
        it.cluster.set_ready("a")
        it.cluster.pods("a", one=False)
        await it.let_pass()
        lines = await it.read_feed()
        assert [row.name for line in lines for row in line.revisions] == [f"{at('a').name}-00001"]
        assert [(row.runtime_id, row.unproven) for line in lines for row in line.replicas] == [("one", True)]
        assert (it.table.ready_count(key()), it.table.live_count(key())) == (0, 1)
        it.cluster.pods("a", one=True, two=True)
        await it.let_pass()
        assert it.table.ready_count(key()) == 2
        assert {pod.runtime_id for pod in it.table} == {"one", "two"}
        assert it.outcomes.last_attempt(key()) is not None
        it.cluster.pods("a", two=True)
        await it.let_pass()
        assert [name for line in await it.read_feed() for name in line.removed_replicas] == ["one"]
        await it.registry.delete_model(BY, TENANT, "m", NOW_S, it.table.is_present, force=True)
        await it.let_pass()
        assert it.cluster.services() == set()
        snapshot = it.feed.snapshot()
        assert (snapshot.revisions, snapshot.replicas, len(tuple(it.table))) == ((), (), 0)


async def test_a_service_elsewhere_gets_no_requests(tmp_path: Path) -> None:
    """Another tenant may create a Service with our version's name in its own namespace. Its pods are not in the feed.
    Control: pods in our namespace are.
    """
    async with running_controller(tmp_path) as it:
        await it.register("a")
        it.cluster.set_ready("a")
        theirs = Ref(SERVICE_API, "Service", "theirs", at("a").name)
        ours = it.cluster.objects[at("a")]
        it.cluster.put({**ours, "metadata": {**ours["metadata"], "namespace": "theirs", "annotations": {
            VERSION: digest("a"), STREAMS: "4"}}})  # fmt: skip
        it.cluster.pods("a", "theirs", stranger=True)
        await it.let_pass()
        assert [row.namespace for row in it.feed.snapshot().revisions] == [NAMESPACE]
        assert it.feed.snapshot().replicas == ()
        assert theirs in it.cluster.objects, "another tenant's Service stays"
        it.cluster.pods("a", one=True)
        await it.let_pass()
        assert [row.runtime_id for row in it.feed.snapshot().replicas] == ["one"]


async def test_unreadable_object_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone may create a bad EndpointSlice or Service in their own namespace. It must not stop the controller."""

    def nameless(it: ControllerScenario, name: str, **target: str) -> None:
        it.cluster._put(
            "discovery.k8s.io/v1", "EndpointSlice", name, {"serving.knative.dev/service": "x"}, "theirs",
            ports=[{"name": "http", "port": 8012}],
            endpoints=[{"addresses": ["10.0.0.9"], "conditions": {}, "targetRef": {"kind": "Pod", **target}}],
        )  # fmt: skip

    def defective(obj: Json) -> Service | None:
        if obj["metadata"]["namespace"] == "theirs":
            raise ValueError(obj["metadata"]["name"])
        return parse_service(obj)

    async with running_controller(tmp_path) as it:
        await it.register("a")
        it.cluster.set_ready("a")
        it.cluster.pods("a", one=True)
        nameless(it, "no-name")
        await it.let_pass(1.0)
        assert [row.runtime_id for row in it.feed.snapshot().replicas] == ["one"]
        monkeypatch.setattr("controlplane.knative.services.version_status.parse_service", defective)
        monkeypatch.setattr("controlplane.knative.services.version_status.parse_revision_failure", defective)
        theirs = it.cluster.objects[at("a")]
        it.cluster.put({**theirs, "metadata": {**theirs["metadata"], "namespace": "theirs"}})
        it.cluster._put(SERVICE_API, "Revision", "theirs", namespace="theirs")
        it.cluster.pods("a", one=True, two=True)
        await it.let_pass(1.0)
        assert {row.runtime_id for row in it.feed.snapshot().replicas} == {"one", "two"}
        assert len(it.cluster.open_watches) == 6


async def test_service_of_another_installation_is_left_alone(tmp_path: Path) -> None:
    """It is in the namespace of a tenant of the same name. Its pods are not in the feed, and waiting requests fail.
    Once it is gone, ours is written.
    """
    async with running_controller(tmp_path) as it:
        await it.register("a")
        ours = it.cluster.objects[at("a")]
        notes = {**ours["metadata"]["annotations"], INSTALLATION: "kelvin-staging"}
        it.cluster.remove(at("a"))
        theirs = it.cluster.put({**ours, "metadata": {**ours["metadata"], "annotations": notes}})
        it.cluster.set_ready("a")
        it.cluster.pods("a", stranger=True)
        it.cluster.calls.clear()
        await it.let_pass(10.0)
        assert it.cluster.calls == []
        assert it.cluster.objects[at("a")]["metadata"]["annotations"] == theirs["metadata"]["annotations"]
        assert (it.feed.snapshot().revisions, it.feed.snapshot().replicas) == ((), ())
        failures = [row for line in await it.read_feed() for row in line.failures]
        assert [row.message for row in failures] == [
            "no replica could be started: the cluster does not take its Service"
        ]
        assert it.controller.refusals()["Foreign"] == 1
        it.cluster.remove(at("a"))
        await it.let_pass(10.0)
        assert it.cluster.calls == [("apply", at("a"))]
        assert it.controller.refusals()["Foreign"] == 0


CONTROLLED = replace(
    CLUSTER, secret="kelvin-store",
    control=ControlEndpoints(url="https://c:7500", snapshotter_url="https://s:7501", secret="kelvin-inner-runtime"),
)  # fmt: skip
SECRETS = NamespaceRequirements.of(CONTROLLED)


async def test_incomplete_namespace_starts_nothing(tmp_path: Path) -> None:
    """A Service is written only to a namespace that is closed, restricted, writable for us, and has its secrets.

    The status, the feed and the push say what it lacks.
    """

    def lacks(it: ControllerScenario) -> tuple[str, str, str]:
        problem = it.outcomes.problem(key())
        assert problem is not None
        (row,) = it.feed.snapshot().start_problems
        assert row.problem == problem, "the feed has the same problem"
        missing, _, remedy = problem.message.partition(" lacks ")[2].partition("; an operator has to ")
        return problem.reason, missing, remedy

    async with running_controller(tmp_path, FakeKnativeCluster("another"), spec=CONTROLLED) as it:
        await it.register("a")
        push = await it.controller.find_start_obstacle(TENANT)
        assert push is not None
        assert push.reason == "refused_object"
        assert f"the namespace {NAMESPACE} does not exist; " in push.message
        assert push == it.outcomes.problem(key())
        assert "`kelvin cluster tenant default`" in push.message
        it.cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "uid": "made by API"}})
        it.cluster.refuse[Ref("v1", "Secret", NAMESPACE, "kelvin-inner-runtime")] = deque([Denied("forbidden")])
        await it.let_pass()
        reason, missing, remedy = lacks(it)
        assert (reason, remedy) == ("refused_object", "apply what `kelvin cluster tenant default` prints")
        assert missing.split(", ") == [
            "the label kelvin.dev/tenant=default",
            "the label pod-security.kubernetes.io/enforce=restricted",
            "a NetworkPolicy that denies all traffic",
            "a NetworkPolicy that admits requests to replicas",
            "a RoleBinding to the ClusterRole kelvin-tenant",
        ]
        it.cluster.create_namespace("default")
        await it.let_pass(6.0)
        secrets = "the secret kelvin-inner-runtime, the secret kelvin-store"
        assert lacks(it) == ("missing_secret", secrets, "create what is missing")
        assert it.cluster.services() == set()
        it.cluster.create_namespace("default", SECRETS)
        await it.let_pass(6.0)
        assert it.cluster.services() == {at("a").name}
        assert it.outcomes.problem(key()) is None
        assert it.feed.snapshot().start_problems == ()
        assert await it.controller.find_start_obstacle(TENANT) is None


async def test_unreadable_namespace_labels_count_as_none() -> None:
    """Nothing starts there. The check raises nothing, since that would end the pass over all versions."""
    clock, cluster = VirtualClock(), FakeKnativeCluster("acme")
    namespace = next(ref for ref in cluster.objects if ref.kind == "Namespace")
    held = cluster.objects[namespace]
    cluster.put({**held, "metadata": {**held["metadata"], "labels": "none"}})
    spaces = TenantNamespaces(cluster, NamespaceRequirements(), clock, lambda: None)
    async with running_loop(spaces):
        await clock.advance(1.0)
        assert not spaces.is_complete("kelvin-acme", "acme")
        failure = spaces.failure("kelvin-acme", "acme")
        assert failure is not None
        assert "the label kelvin.dev/tenant=acme" in failure.message


async def test_namespace_deleted_during_a_probe_ends_no_watch() -> None:
    """The other namespace is known after its probe, and nothing is listed again."""
    clock, cluster = VirtualClock(), FakeKnativeCluster("acme", "beta")
    secret = Ref("v1", "Secret", "kelvin-acme", "s")
    spaces = TenantNamespaces(cluster, NamespaceRequirements(secrets=("s",)), clock, lambda: None)
    async with running_loop(spaces):
        await clock.advance(1.0)
        cluster.answered.clear()
        for tenant in ("acme", "beta"):
            spaces.is_complete(f"kelvin-{tenant}", tenant)
        await clock.advance(1.0)
        assert cluster.calls == [("exists", secret)]
        cluster.remove(Ref("v1", "Namespace", None, "kelvin-beta"))
        await clock.advance(1.0)
        cluster.answered.set()
        await clock.advance(1.0)
        failure = spaces.failure("kelvin-acme", "acme")
        assert failure is not None
        assert "the secret s" in failure.message
        assert len(cluster.open_watches) == 2


async def test_namespace_of_a_waiting_caller_is_probed() -> None:
    """A pass over the versions, none of which uses the namespace, does not drop the probe."""
    clock, cluster = VirtualClock(), FakeKnativeCluster("acme", "beta")
    spaces = TenantNamespaces(cluster, NamespaceRequirements(secrets=("s",)), clock, lambda: None)
    async with running_loop(spaces):
        await clock.advance(1.0)
        cluster.answered.clear()
        spaces.is_complete("kelvin-acme", "acme")
        await clock.advance(1.0)
        waiting = asyncio.create_task(spaces.wait_until_known("kelvin-beta", "beta"))
        await clock.advance(0.1)
        spaces.retain({"kelvin-acme"})
        cluster.answered.set()
        await clock.advance(1.0)
        assert waiting.done()
        waiting.cancel()


async def test_service_survives_losses_of_its_namespace(tmp_path: Path) -> None:
    """An existing Service is still updated. Only a new one has to wait."""
    async with running_controller(tmp_path) as it:
        await it.register("a")
        it.cluster.remove(Ref("networking.k8s.io/v1", "NetworkPolicy", NAMESPACE, "nobody"))
        await it.registry.rescale(BY, TENANT, "m", {"max": 7}, NOW_S)
        await it.let_pass()
        notes = it.cluster.objects[at("a")]["spec"]["template"]["metadata"]["annotations"]
        assert notes["autoscaling.knative.dev/max-scale"] == "7"
        await it.register("b")
        await it.deploy("b")
        assert it.cluster.services() == {at("a").name}
        problem = it.outcomes.problem(key(letter="b"))
        assert problem is not None
        assert "a NetworkPolicy that denies all traffic" in problem.message


async def test_unanswered_probe_reports_no_missing_secret(tmp_path: Path) -> None:
    """The probe is repeated, and no secret is reported as missing."""
    async with running_controller(tmp_path, spec=CONTROLLED) as it:
        secret = Ref("v1", "Secret", NAMESPACE, "kelvin-inner-runtime")
        it.cluster.refuse[secret] = deque([Unreachable("away"), None])
        it.cluster.create_namespace("default", SECRETS)
        await it.register("a")
        assert (it.cluster.services(), it.outcomes.problem(key())) == (set(), None)
        await it.let_pass(6.0)
        assert it.cluster.services() == {at("a").name}


async def test_old_version_keeps_its_service_until_new_one_is_ready(tmp_path: Path) -> None:
    """Knative creates the new Revision first; only when it is ready does the old Service go."""
    async with running_controller(tmp_path) as it:
        await it.register("a")
        await it.register("b")
        assert it.cluster.services() == {at("a").name}, "no alias names the second one"
        it.cluster.set_ready("a")
        await it.deploy("b")
        assert it.cluster.services() == {at("a").name, at("b").name}
        it.cluster.set_status(at("b"), latestCreatedRevisionName="x-00001")
        await it.let_pass()
        assert it.cluster.services() == {at("a").name, at("b").name}
        it.cluster.set_ready("b")
        await it.let_pass()
        assert it.cluster.services() == {at("b").name}


async def test_previous_version_serves_during_a_deploy(tmp_path: Path) -> None:
    """From the deploy on it takes the requests that the new version can't take. This ends when it has no pod, or when
    the new version has been ready for the overlap time.
    """

    def answers(it: ControllerScenario) -> dict[str, str]:
        (row,) = it.feed.snapshot().models
        return {new[0]: old[0] for new, old in row.meanwhile.items()}

    async with running_controller(tmp_path / "one") as it:
        await it.register("a")
        await it.register("b")
        it.cluster.set_ready("a")
        it.cluster.pods("a", one=True)
        await it.let_pass()
        assert answers(it) == {}
        await it.read_feed()
        await it.registry.deploy(BY, TENANT, "m", digest("b")[:12], NOW_S)
        (line,) = [line for line in await it.read_feed() if line.models]
        assert line.models[0].aliases == {"prod": digest("b")}
        assert line.models[0].meanwhile == {digest("b"): digest("a")}, "it is in the line of the alias"
        await it.let_pass()
        it.cluster.set_ready("b")
        it.cluster.pods("b", two=True)
        await it.let_pass(OVERLAP_S - 5.0)
        assert (answers(it), it.cluster.services()) == ({"b": "a"}, {at("a").name, at("b").name})
        await it.let_pass(10.0)
        assert (answers(it), it.cluster.services()) == ({}, {at("b").name})
    async with running_controller(tmp_path / "two") as it:
        await it.register("a")
        await it.register("b")
        it.cluster.set_ready("a")
        it.cluster.pods("a", one=True)
        await it.deploy("b")
        it.cluster.set_ready("b")
        it.cluster.pods("a")
        await it.let_pass(5.0)
        assert (answers(it), it.cluster.services()) == ({}, {at("b").name})


async def test_spent_budget_ends_a_minimum(tmp_path: Path) -> None:
    """The minimum is written as zero within seconds, and restored with a new budget."""
    async with running_controller(tmp_path) as it:

        def least() -> str:
            notes = it.cluster.objects[at("a")]["spec"]["template"]["metadata"]["annotations"]
            return str(notes["autoscaling.knative.dev/min-scale"])

        def spent(micros: int) -> None:
            prices = TokenPrices(per_tokens=1, prompt=1, cached=1, completion=1, request=1)
            row = SpendingRow(tenant=TENANT, month="2023-11", ends_at_us=1, prices=prices, seen={}, spent_micros=micros)
            limits = TenantLimits(budget_micros=100)
            it.feed.publish(Feed(tenants=(TenantRow(tenant=TENANT, suspended=False, limits=limits),), spending=(row,)))

        await it.register("a")
        await it.registry.rescale(BY, TENANT, "m", {"min": 1}, NOW_S)
        for micros, want in ((99, "1"), (100, "0"), (0, "1")):
            spent(micros)
            await it.let_pass(5)
            assert least() == want


async def test_minimum_beyond_the_share_of_devices_is_refused(tmp_path: Path) -> None:
    """With a device limit, a tenant's minimums take at most its share."""
    async with running_controller(tmp_path, devices=4) as it:
        await it.register("a")
        model = it.registry.model(TENANT, "m")
        it.controller.check_scale(model, ScaleSettings(min=4, max=8))
        it.feed.publish(Feed(tenants=(TenantRow(tenant="other", suspended=False),)))
        row = ReplicaRow(
            runtime_id="r", tenant="other", model="x", version=digest("a"), address="", max_streams=1, draining=False,
            restore=(),
        )  # fmt: skip
        it.table.upsert(row)
        with pytest.raises(Refused, match="must be 2 or less: your tenant's share of 4 device slots is 2"):
            it.controller.check_scale(model, ScaleSettings(min=3, max=8))


async def test_failed_start_fails_waiting_requests_once(tmp_path: Path) -> None:
    """Requests get one failure in our own words, and the status has the last attempt. A ready pod clears it."""
    async with running_controller(tmp_path) as it:
        await it.register("a")
        it.cluster.set_status(at("a"), latestCreatedRevisionName=f"{at('a').name}-00001")
        await it.let_pass()
        await it.read_feed()
        for _ in range(3):
            it.cluster.revision("a", "ImagePullBackOff")
            it.cluster.resync()
            await it.let_pass()
        failures = [row for line in await it.read_feed() for row in line.failures]
        assert [(row.code, row.status, row.retryable) for row in failures] == [("start_failed", 503, True)]
        assert failures[0].message == "no replica could be started: its image can't be pulled"
        last_attempt = it.outcomes.last_attempt(key())
        assert last_attempt is not None
        assert last_attempt.failure is not None
        assert last_attempt.failure[0] == "start_failed"
        it.cluster.revision("a", None)
        it.cluster.set_ready("a")
        it.cluster.pods("a", one=True)
        await it.let_pass()
        last_attempt = it.outcomes.last_attempt(key())
        assert last_attempt is not None
        assert last_attempt.failure is None


def problem(it: ControllerScenario) -> str | None:
    """Return the reason in the status, after checking that the feed has the same."""
    found = it.outcomes.problem(key())
    rows = [row.problem for row in it.feed.snapshot().start_problems]
    assert rows == ([] if found is None else [found])
    return None if found is None else found.reason


def pod_of(it: ControllerScenario, waiting: str = "", *conditions: dict[str, str], code: int = 0) -> None:
    """Set a pod of the version with this kubelet status."""
    last_attempt = {"terminated": {"exitCode": code}} if code else {}
    state = {"waiting": {"reason": waiting}} if waiting else {"running": {}}
    labels = {"app.kubernetes.io/managed-by": "kelvin", "serving.knative.dev/service": at("a").name}
    about = {"name": "one", "namespace": NAMESPACE, "uid": "one", "labels": labels}
    container = {"name": "runtime", "restartCount": 3 if code else 0, "state": state, "lastState": last_attempt}
    it.cluster.put({
        "apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": {},
        "status": {"conditions": list(conditions), "containerStatuses": [container]},
    })  # fmt: skip


async def test_pods_that_do_not_become_ready_are_explained(tmp_path: Path) -> None:
    """The cause is the version's start problem. It is not a failed start, because the pod may still become ready."""
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    async with running_controller(tmp_path) as it:
        await it.register("a")
        it.cluster.set_status(at("a"), latestCreatedRevisionName=f"{at('a').name}-00001")
        await it.let_pass()
        for waiting, conditions, code, want in (
            ("", (unschedulable | {"lastTransitionTime": "2026-11-20T10:00:00Z"},), 0, "no_room"),
            ("CreateContainerConfigError", (), 0, "missing_secret"),
            ("ImagePullBackOff", (), 0, "no_image"),
            ("CrashLoopBackOff", (), 137, "crash_loop"),
        ):
            pod_of(it, waiting, *conditions, code=code)
            await it.let_pass()
            assert problem(it) == want
        found = it.outcomes.problem(key())
        assert found is not None
        assert found.exit_status == -9
        assert not [row for line in await it.read_feed() for row in line.failures]
        pod_of(it)
        await it.let_pass()
        assert problem(it) is None


async def test_start_problem_ends_with_the_last_pod_of_a_version(tmp_path: Path) -> None:
    """The Service may go first, when another version replaces it."""
    async with running_controller(tmp_path) as it:
        await it.register("a")
        pod_of(it, "CrashLoopBackOff", code=137)
        await it.let_pass()
        assert problem(it) == "crash_loop"
        await it.register("b")
        await it.deploy("b")
        it.cluster.set_ready("b")
        await it.let_pass(OVERLAP_S * 3)
        assert it.cluster.services() == {at("b").name}
        it.cluster.remove(Ref("v1", "Pod", NAMESPACE, "one"))
        await it.let_pass()
        assert problem(it) is None


async def test_start_problem_ends_if_its_pod_went_between_two_terms(tmp_path: Path) -> None:
    """Another process led meanwhile, and the pod is gone when this one leads again."""
    async with create_controller(tmp_path) as it:
        async with running_loop(it.controller):
            await it.register("a")
            pod_of(it, "CrashLoopBackOff", code=137)
            await it.let_pass()
            assert problem(it) == "crash_loop"
        it.cluster.remove(Ref("v1", "Pod", NAMESPACE, "one"))
        async with running_loop(it.controller):
            await it.let_pass(30.0)
            assert problem(it) is None


async def test_start_problem_ends_if_its_reason_went_between_terms(tmp_path: Path) -> None:
    """This holds without a pod, too: the namespace exists by now, or the cluster accepts the Service."""
    async with create_controller(tmp_path, FakeKnativeCluster("another"), spec=CONTROLLED) as it:
        async with running_loop(it.controller):
            await it.register("a")
            await it.let_pass()
            assert problem(it) == "refused_object"
        it.cluster.create_namespace("default", SECRETS)
        it.cluster.refuse[at("a")] = deque([Invalid("no")] * 100)
        async with running_loop(it.controller):
            await it.let_pass(6.0)
            assert problem(it) == "refused_object"
        it.cluster.refuse.clear()
        async with running_loop(it.controller):
            await it.let_pass(6.0)
            assert it.cluster.services() == {at("a").name}
            assert problem(it) is None


async def test_refused_service_fails_waiting_requests_once(tmp_path: Path) -> None:
    """The cluster refuses the object. Requests fail once, and the write is retried."""
    async with running_controller(tmp_path) as it:
        it.cluster.refuse[at("a")] = deque([Invalid("admission webhook denied the request: /etc/secret")] * 6)
        await it.register("a")
        for _ in range(5):
            await it.let_pass(2.0)
        failures = [row for line in await it.read_feed() for row in line.failures]
        assert [row.message for row in failures] == [
            "no replica could be started: the cluster does not take its Service"
        ]
        assert it.controller.refusals()["Invalid"] == 1
        assert problem(it) == "refused_object"
        await it.let_pass(400.0)
        assert problem(it) is None, "the cluster accepted it in the end"
        assert it.cluster.services() == {at("a").name}
        assert it.controller.refusals()["Invalid"] == 0


@pytest.mark.parametrize("lasts", [False, True], ids=["it is away for a moment", "it is away for long"])
async def test_requests_wait_while_the_cluster_is_away(tmp_path: Path, lasts: bool) -> None:
    """The version is new. After half a minute its requests fail, because it has no Service."""
    async with running_controller(tmp_path) as it:
        it.cluster.refuse[at("a")] = deque([Unreachable("away")] * (100 if lasts else 2))
        await it.register("a")
        for _ in range(25):
            await it.let_pass(1.0)
        assert [row for line in await it.read_feed() for row in line.failures] == []
        assert problem(it) is None
        assert it.cluster.services() == (set() if lasts else {at("a").name})
        for _ in range(10):
            await it.let_pass(1.0)
        codes = [row.code for line in await it.read_feed() for row in line.failures]
        assert (codes, problem(it)) == ((["start_failed"], "refused_object") if lasts else ([], None))


async def test_resync_publishes_missed_deletions(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as it:
        await it.register("a")
        it.cluster.set_ready("a")
        it.cluster.pods("a", one=True)
        await it.let_pass()
        for ref in [ref for ref in it.cluster.objects if ref.kind == "EndpointSlice"]:
            del it.cluster.objects[ref]
        await it.read_feed()
        it.cluster.resync()
        await it.let_pass()
        assert [name for line in await it.read_feed() for name in line.removed_replicas] == ["one"]


async def test_takeover_keeps_services_and_replicas(tmp_path: Path) -> None:
    """The first snapshot has the running replicas. A deploy that was not yet written is written, and the old Service
    stays.
    """
    cluster, clock = FakeKnativeCluster(), VirtualClock()
    async with create_controller(tmp_path, cluster, clock) as it:
        async with running_loop(it.controller):
            await it.register("a")
            cluster.set_ready("a")
            cluster.pods("a", one=True)
            await it.let_pass()
        await it.register("b")  # no loop runs, so nothing is written
        await it.deploy("b")
        assert cluster.services() == {at("a").name}
    async with create_controller(tmp_path, cluster, clock) as it, running_loop(it.controller):
        await asyncio.wait_for(it.controller.synced.wait(), 10)
        assert [row.runtime_id for row in it.feed.snapshot().replicas] == ["one"]
        await it.let_pass()
        assert cluster.services() == {at("a").name, at("b").name}
        assert it.table.replicas_of(key())[0].state is ReplicaState.READY


async def test_takeover_deletes_no_service_that_may_be_in_use(tmp_path: Path) -> None:
    """The old version of a deploy goes only after a stable window, when activators have reported."""
    async with create_controller(tmp_path) as it:
        async with running_loop(it.controller):
            await it.register("a")
            it.cluster.set_ready("a")
            it.cluster.pods("a", one=True)
            await it.register("b")
            await it.deploy("b")
            it.cluster.set_ready("b")
            await it.let_pass()
            assert it.cluster.services() == {at("a").name, at("b").name}
        async with running_loop(it.controller):
            await it.let_pass(50)
            assert it.cluster.services() == {at("a").name, at("b").name}
            await it.let_pass(20)
            assert it.cluster.services() == {at("b").name}


async def test_new_leader_starts_no_overlap(tmp_path: Path) -> None:
    """Both versions of a split were ready before the takeover, so neither gets a previous version."""

    class AdvancingClock(VirtualClock):
        """A clock that advances at each call, as a real one does."""

        def monotonic_us(self) -> int:
            self._now_us += 1
            return self._now_us

    async with create_controller(tmp_path, clock=AdvancingClock()) as it:
        async with running_loop(it.controller):
            for letter in ("a", "b"):
                await it.register(letter)
            weights = {digest("a")[:12]: 9, digest("b")[:12]: 1}
            await it.registry.split(BY, TENANT, "m", weights, NOW_S)
            await it.let_pass()
            for letter in ("a", "b"):
                it.cluster.set_ready(letter)
            await it.let_pass(2 * OVERLAP_S)
            assert it.feed.snapshot().models[0].meanwhile == {}
        async with running_loop(it.controller):
            await asyncio.wait_for(it.controller.synced.wait(), 10)
            for _ in range(3):
                assert it.feed.snapshot().models[0].meanwhile == {}
                await it.let_pass(1.0)


async def test_second_term_starts_from_current_objects(tmp_path: Path) -> None:
    """State of the first term is dropped: deleted objects leave the feed, old Services are not written, and `synced` is
    unset until all is seen.
    """
    async with create_controller(tmp_path) as it:
        async with running_loop(it.controller):
            await it.register("a")
            it.cluster.set_ready("a")
            it.cluster.pods("a", one=True)
            await it.let_pass()
            assert [row.runtime_id for row in it.feed.snapshot().replicas] == ["one"]
        await it.registry.delete_model(BY, TENANT, "m", NOW_S, it.table.is_present, force=True)
        it.cluster.objects.clear()
        it.cluster.calls.clear()
        it.cluster.watches_deliver.clear()
        async with running_loop(it.controller):
            await it.let_pass()
            assert not it.controller.synced.is_set()
            it.cluster.watches_deliver.set()
            await it.let_pass(10.0)
            assert it.controller.synced.is_set()
            assert it.cluster.calls == []
            snapshot = it.feed.snapshot()
            assert (snapshot.revisions, snapshot.replicas, len(tuple(it.table))) == ((), (), 0)


async def test_a_defect_leaves_no_watch_open(tmp_path: Path) -> None:
    """All six watches are closed."""
    async with create_controller(tmp_path) as it:
        running_loop = asyncio.create_task(it.controller.run())
        await it.let_pass()
        assert len(it.cluster.open_watches) == 6
        for kind, changes in it.cluster.open_watches:
            if kind[1] == "Service":
                changes.put_nowait(Upsert({"apiVersion": "v1", "metadata": {}}))
        with pytest.raises(ExceptionGroup) as raised:
            await running_loop
        assert raised.group_contains(KeyError)
        assert it.cluster.open_watches == []


async def test_defect_removes_no_replica_from_the_feed(tmp_path: Path) -> None:
    """Replicas stay in the feed until all objects are seen again. Those that went meanwhile leave then."""
    async with create_controller(tmp_path) as it:
        first = asyncio.create_task(it.controller.run())
        await it.let_pass()
        for model in ("m", "n"):
            await it.register(model=model)
            name = f"{at('a', model).name}-00001"
            it.cluster.set_status(at("a", model), "True", latestCreatedRevisionName=name, latestReadyRevisionName=name)
        it.cluster.pods("a", stays=True)
        it.cluster.pods("a", model="n", goes=True)
        await it.let_pass()
        for kind, changes in it.cluster.open_watches:
            if kind[1] == "Service":
                changes.put_nowait(Upsert({"apiVersion": "v1", "metadata": {}}))
        with pytest.raises(ExceptionGroup):
            await first
        it.cluster.remove(at("a", "n"))
        it.cluster.remove(Ref("discovery.k8s.io/v1", "EndpointSlice", NAMESPACE, f"{name}-private-x"))
        it.cluster.watches_deliver.clear()
        async with running_loop(it.controller):
            await it.let_pass()
            assert {row.runtime_id for row in it.feed.snapshot().replicas} == {"stays", "goes"}
            it.cluster.watches_deliver.set()
            await it.let_pass()
            assert it.controller.synced.is_set()
            assert [row.runtime_id for row in it.feed.snapshot().replicas] == ["stays"]
