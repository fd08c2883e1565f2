"""Pods that wait for a node: the node class that they need, the expected wait, and why a start is pending."""

from typing import Any

import pytest

from controlplane.knative.policy.pending_replicas import (
    GUESS_S,
    MAX_CLASSES,
    OVERDUE_RATIO,
    START_GUESS_S,
    NodeClass,
    ObservedPod,
    Pending,
    PodProblem,
    PodWaits,
    node_of,
    parse_pod,
)

GPU = NodeClass("gpu", "any", "no")
CPU = NodeClass("cpu", "any", "no")
SERVICE = ("kelvin-acme", "llama-3f")
ONE, TWO = ("kelvin-acme", "llama-3f-00001-x"), ("kelvin-acme", "llama-3f-00001-y")
T = 1_795_000_000.0


def spec(
    device: str | None = None, nodes: dict[str, str] | None = None, tolerated: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a pod spec as the product renders it, with queue-proxy."""
    limits = {"memory": "6Gi"} | ({} if device is None else {device: "1"})
    return {
        "containers": [{"name": "runtime", "resources": {"limits": limits}}, {"name": "queue-proxy"}],
        **({} if nodes is None else {"nodeSelector": nodes}),
        "tolerations": [{"key": key, "operator": "Exists"} for key in tolerated],
    }


@pytest.mark.parametrize(
    ("pod_spec", "want"),
    [
        pytest.param(spec(), CPU, id="CPU only"),
        pytest.param({}, CPU, id="an empty spec"),
        pytest.param(spec("nvidia.com/gpu", tolerated=("nvidia.com/gpu",)), GPU, id="a device that is tolerated"),
        pytest.param(spec("nvidia.com/mig-1g.10gb"), NodeClass("mig-1g.10gb", "any", "no"), id="a slice of a device"),
        pytest.param(
            spec("nvidia.com/gpu", {"topology.kubernetes.io/zone": "eu-1a"}), NodeClass("gpu", "eu-1a", "no"),
            id="one zone",
        ),
        pytest.param(
            spec("nvidia.com/gpu", {"kelvin.dev/capacity": "spot"}, ("kelvin.dev/capacity",)),
            NodeClass("gpu", "any", "only"), id="spot only, as in the manifests",
        ),
        pytest.param(
            spec(None, {"karpenter.sh/capacity-type": "spot"}), NodeClass("cpu", "any", "only"), id="Karpenter's spot",
        ),
        pytest.param(
            spec(None, None, ("cloud.google.com/gke-spot",)), NodeClass("cpu", "any", "may"), id="spot allowed",
        ),
        pytest.param(
            spec(None, {"kelvin.dev/capacity": "on-demand"}), CPU, id="control: on-demand",
        ),
        pytest.param(spec(None, {"gpu": "h100"}, ("gpu",)), CPU, id="control: unrelated labels"),
    ],
)  # fmt: skip
def test_node_class_follows_from_the_pod_spec(pod_spec: dict[str, Any], want: NodeClass) -> None:
    """The class follows from resources, node selector and tolerations."""
    assert node_of(pod_spec) == want


def pod(*conditions: dict[str, str], **about: Any) -> dict[str, Any]:
    """Return a pod as an API server returns it."""
    labels = {"serving.knative.dev/service": "llama-3f", "serving.knative.dev/revision": "llama-3f-00001"}
    metadata = {"name": ONE[1], "namespace": ONE[0], "labels": labels, "creationTimestamp": "2026-11-20T10:00:00Z"}
    return {
        "metadata": metadata | about,
        "spec": spec("nvidia.com/gpu"),
        "status": {"phase": "Pending", "conditions": list(conditions)},
    }


def scheduled(status: str, reason: str = "", at: str = "2026-11-20T10:00:05Z") -> dict[str, str]:
    """Return a PodScheduled condition."""
    return {"type": "PodScheduled", "status": status, "reason": reason, "lastTransitionTime": at}


BORN_S = 1_795_168_800.0


@pytest.mark.parametrize(
    ("obj", "want"),
    [
        pytest.param(pod(), ObservedPod("llama-3f", GPU), id="just created"),
        pytest.param(
            pod(scheduled("False", "Unschedulable")), ObservedPod("llama-3f", GPU, unschedulable_since_s=BORN_S + 5),
            id="no node has room",
        ),
        pytest.param(
            pod(scheduled("False", "Unschedulable") | {"lastTransitionTime": ""}),
            ObservedPod("llama-3f", GPU, unschedulable_since_s=BORN_S), id="no node has room, and the time is missing",
        ),
        pytest.param(
            pod(scheduled("False", "SchedulingGated")), ObservedPod("llama-3f", GPU), id="held by a scheduling gate"
        ),
        pytest.param(pod(scheduled("True")), ObservedPod("llama-3f", GPU, placed_s=BORN_S + 5), id="it has a node"),
        pytest.param(
            pod(scheduled("True"), {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-20T10:01:00Z"}),
            ObservedPod("llama-3f", GPU, placed_s=BORN_S + 5, ready_s=BORN_S + 60), id="it serves",
        ),
        pytest.param(
            pod(scheduled("False", "Unschedulable"), deletionTimestamp="2026-11-20T10:02:00Z"),
            ObservedPod("llama-3f", GPU, unschedulable_since_s=BORN_S + 5, is_leaving=True),
            id="it is being deleted",
        ),
        pytest.param(pod(labels={"app": "queue"}), None, id="a foreign pod"),
        pytest.param(pod(labels=None), None, id="a pod without labels"),
    ],
)  # fmt: skip
def test_pod_status_is_parsed(obj: dict[str, Any], want: ObservedPod | None) -> None:
    """The result has the node class, and the times since when it waits, has a node, is ready."""
    assert parse_pod(obj) == want


def waits(since_s: float = T, node: NodeClass = GPU) -> ObservedPod:
    return ObservedPod(SERVICE[1], node, unschedulable_since_s=since_s)


def placed(at_s: float, node: NodeClass = GPU) -> ObservedPod:
    return ObservedPod(SERVICE[1], node, placed_s=at_s)


def serves(placed_s: float, ready_s: float) -> ObservedPod:
    return ObservedPod(SERVICE[1], GPU, placed_s=placed_s, ready_s=ready_s)


def test_pending_replicas_are_counted_by_class() -> None:
    """Only waiting pods count. A class that got a node stays in the list with a count of zero."""
    nodes = PodWaits()
    assert nodes.pending() == ()
    nodes.update_pod(ONE, waits())
    nodes.update_pod(TWO, waits(T + 5))
    nodes.update_pod(("kelvin-other", "z"), waits(T + 9, CPU))
    nodes.update_pod(("kelvin-other", "gone"), ObservedPod("s", CPU, unschedulable_since_s=T, is_leaving=True))
    nodes.update_pod(("kelvin-other", "ready"), serves(T, T + 1))
    assert nodes.pending() == (Pending(CPU, 1, T + 9, GUESS_S, 0), Pending(GPU, 2, T, GUESS_S, 0))
    nodes.update_pod(ONE, placed(T + 60))
    nodes.update_pod(TWO, None)
    nodes.update_pod(("kelvin-other", "z"), None)
    assert nodes.pending() == (Pending(GPU, 0, None, 60.0, 1),)
    nodes.check_integrity()


def test_service_is_returned_when_a_wait_begins_or_ends() -> None:
    """Other changes return nothing."""
    nodes = PodWaits()
    assert nodes.update_pod(ONE, ObservedPod(SERVICE[1], GPU)) is None
    assert nodes.update_pod(ONE, waits()) == SERVICE
    assert nodes.update_pod(ONE, waits()) is None
    assert list(nodes.services()) == [SERVICE]
    assert nodes.update_pod(ONE, placed(T + 5)) == SERVICE
    assert nodes.update_pod(ONE, serves(T + 5, T + 9)) is None
    assert list(nodes.services()) == []
    assert nodes.update_pod(TWO, waits()) == SERVICE
    assert nodes.update_pod(TWO, None) == SERVICE
    nodes.check_integrity()


def test_forecast_includes_the_wait_for_a_node() -> None:
    """Defaults come first, then the mean of past waits for this class and of starts. Waits of another class do not
    count.
    """
    nodes = PodWaits()
    assert nodes.forecast_ready_s(SERVICE, T) is None
    nodes.update_pod(ONE, waits())
    assert nodes.forecast_ready_s(SERVICE, T) == GUESS_S + START_GUESS_S
    assert nodes.forecast_ready_s(SERVICE, T + 30) == GUESS_S - 30 + START_GUESS_S
    nodes.update_pod(ONE, placed(T + 60))
    assert nodes.forecast_ready_s(SERVICE, T + 70) == START_GUESS_S - 10
    nodes.update_pod(ONE, serves(T + 60, T + 80))
    assert nodes.forecast_ready_s(SERVICE, T + 90) is None
    nodes.update_pod(ONE, None)
    nodes.update_pod(TWO, waits(T + 100))
    assert nodes.forecast_ready_s(SERVICE, T + 100) == 60 + 20
    nodes.update_pod(TWO, placed(T + 200))
    nodes.update_pod(TWO, None)
    nodes.update_pod(TWO, waits(T + 300))
    assert nodes.forecast_ready_s(SERVICE, T + 300) == pytest.approx(0.3 * 100 + 0.7 * 60 + 20)
    nodes.update_pod(TWO, waits(T + 300, CPU))
    assert nodes.forecast_ready_s(SERVICE, T + 300) == GUESS_S + 20
    nodes.check_integrity()


@pytest.mark.parametrize(
    ("seen", "left_s"),
    [
        pytest.param([waits(), waits(T - 50)], GUESS_S - 50 + START_GUESS_S, id="two wait: the first one counts"),
        pytest.param([waits(), placed(T)], START_GUESS_S, id="one has its node"),
        pytest.param([placed(T - 500)], 0.0, id="a start that should be over"),
        pytest.param([waits(T + 600)], GUESS_S + START_GUESS_S, id="our clock is behind: the wait counts from now"),
        pytest.param([placed(T + 600)], START_GUESS_S, id="our clock is behind: the start counts from now"),
        pytest.param(
            [waits(T - 400)], OVERDUE_RATIO * 400 + START_GUESS_S, id="longer than past waits: half as long again"
        ),
        pytest.param([waits(), serves(T - 9, T - 1)], None, id="one serves"),
        pytest.param([ObservedPod(SERVICE[1], GPU)], None, id="a pod without a condition"),
        pytest.param(
            [ObservedPod(SERVICE[1], GPU, unschedulable_since_s=T, is_leaving=True)],
            None,
            id="a pod that is being deleted",
        ),
    ],
)
def test_forecast_is_of_the_first_ready_pod(seen: list[ObservedPod], left_s: float | None) -> None:
    """The first ready pod serves the waiting requests."""
    nodes = PodWaits()
    for number, each in enumerate(seen):
        nodes.update_pod(("kelvin-acme", f"pod-{number}"), each)
    assert nodes.forecast_ready_s(SERVICE, T) == left_s


def test_lapsed_readiness_is_no_new_start() -> None:
    """A pod that is not ready for a while teaches nothing about starts."""
    nodes = PodWaits()
    nodes.update_pod(ONE, placed(T))
    nodes.update_pod(ONE, serves(T, T + 20))
    nodes.update_pod(ONE, placed(T))
    assert nodes.forecast_ready_s(SERVICE, T + 900) is None
    nodes.update_pod(ONE, serves(T, T + 900))
    nodes.update_pod(ONE, None)
    nodes.update_pod(TWO, placed(T + 1000))
    assert nodes.forecast_ready_s(SERVICE, T + 1000) == 20


@pytest.mark.parametrize(
    ("state", "want"),
    [
        pytest.param(
            {"waiting": {"reason": "CrashLoopBackOff"}}, PodProblem("CrashLoopBackOff", -9), id="a crash loop"
        ),
        pytest.param({"running": {}}, None, id="it runs, is not ready yet, and its restarts may be old"),
    ],
)
def test_ready_pod_may_enter_a_crash_loop(state: dict[str, Any], want: PodProblem | None) -> None:
    """A crash loop counts although the start is over. It ends once the pod is ready again."""
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-20T10:00:00Z"}
    died = {"lastState": {"terminated": {"exitCode": 137}}, "restartCount": 3, "state": state}
    about = {"name": "p", "labels": {"serving.knative.dev/service": SERVICE[1]}}
    serving = {"metadata": about, "status": {"conditions": [ready], "containerStatuses": [{"ready": True}]}}
    lapsed = {"conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [died]}
    nodes = PodWaits()
    for status, found in ((serving["status"], None), (lapsed, want), (lapsed, want), (serving["status"], None)):
        nodes.update_pod((SERVICE[0], "p"), parse_pod({"metadata": about, "status": status}))
        assert nodes.problem(SERVICE) == found


def test_reset_keeps_measured_waits() -> None:
    """A leader's second term sees all pods again."""
    nodes = PodWaits()
    nodes.update_pod(ONE, waits())
    nodes.update_pod(ONE, placed(T + 60))
    nodes.update_pod(TWO, waits())
    nodes.forget()
    nodes.check_integrity()
    assert nodes.pending() == (Pending(GPU, 0, None, 60.0, 1),)
    assert nodes.forecast_ready_s(SERVICE, T) is None


def test_measured_waits_are_bounded() -> None:
    """Node classes come from node selectors, whose number has no bound."""
    nodes = PodWaits()
    for number in range(MAX_CLASSES + 5):
        node = NodeClass("gpu", f"zone-{number}", "no")
        nodes.update_pod(ONE, waits(T, node))
        nodes.update_pod(ONE, placed(T + 1, node))
        nodes.update_pod(ONE, None)
    nodes.check_integrity()
    assert len(nodes.pending()) == MAX_CLASSES


def container(waiting: str = "", restarts: int = 0, code: int | None = None, *, ready: bool = False) -> dict[str, Any]:
    """Return a container's status."""
    state = {"waiting": {"reason": waiting}} if waiting else {"running": {}}
    last = {} if code is None else {"terminated": {"exitCode": code}}
    return {"name": "runtime", "ready": ready, "restartCount": restarts, "state": state, "lastState": last}


@pytest.mark.parametrize(
    ("statuses", "want"),
    [
        pytest.param([], None, id="no container yet"),
        pytest.param([container("ContainerCreating")], None, id="a container is being created"),
        pytest.param(
            [container("CreateContainerConfigError")], PodProblem("CreateContainerConfigError"), id="a missing secret"
        ),
        pytest.param([container("ImagePullBackOff")], PodProblem("ImagePullBackOff"), id="a missing image"),
        pytest.param([container("CrashLoopBackOff", 3, 1)], PodProblem("CrashLoopBackOff", 1), id="a crash loop"),
        pytest.param([container("", 3, 137)], PodProblem("CrashLoopBackOff", -9), id="a loop, by a signal"),
        pytest.param([container("", 1, 1)], None, id="one restart is no crash loop"),
        pytest.param([container("", 3, 1, ready=True)], None, id="a ready container"),
        pytest.param([container(ready=True), container("ErrImagePull")], PodProblem("ErrImagePull"), id="one of two"),
    ],
)
def test_why_a_pod_is_not_ready(statuses: list[dict[str, Any]], want: PodProblem | None) -> None:
    """Of all container states, only those that keep a pod from ever being ready count."""
    nodes = PodWaits()
    seen = parse_pod({**pod(scheduled("True")), "status": {"containerStatuses": statuses}})
    nodes.update_pod(ONE, seen)
    assert nodes.problem(SERVICE) == want
    nodes.update_pod(TWO, serves(T, T + 1))
    assert nodes.problem(SERVICE) is None, "another pod serves"
    nodes.check_integrity()
