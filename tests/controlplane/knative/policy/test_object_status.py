"""Status of cluster objects. Each case is a shape that a real API server returned."""

import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.knative.policy.object_status import (
    Pod,
    RevisionFailure,
    Service,
    SlicePods,
    describe_reason,
    parse_revision_failure,
    parse_service,
    parse_slice_pods,
    replica_row,
    revision_row,
)
from controlplane.registry.policy.domain import VersionKey

DIGEST = "3f" * 32
OF = VersionKey("acme", "llama", DIGEST)
RECORDED = Path(__file__).parents[4].parent / "shared" / "knative-recorded"


def knative_service(status: Any = None, **about: Any) -> dict[str, Any]:
    """Return a Service as we write it, with Knative's status."""
    metadata = {
        "name": "llama-3f3f3f3f3f3f",
        "namespace": "kelvin-acme",
        "labels": {"kelvin.dev/tenant": "acme", "kelvin.dev/model": "llama"},
        "annotations": {"kelvin.dev/version": DIGEST, "kelvin.dev/streams": "8"},
        **about,
    }
    spec = {"template": {"spec": {"containerConcurrency": 16}}}
    return {"kind": "Service", "metadata": metadata, "spec": spec} | ({} if status is None else {"status": status})


def status(ready: str, reason: str | None = None, **more: str) -> dict[str, Any]:
    """Return the status of a Service or a Revision."""
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": "2026-11-20T10:17:24Z"}
    return {"conditions": [condition | ({"reason": reason} if reason else {})], **more}


def endpoint_slice(*endpoints: Any, ports: Any = ({"name": "http", "port": 8012},)) -> dict[str, Any]:
    """Return a slice of a revision's private service."""
    labels = {"serving.knative.dev/service": "llama-3f3f3f3f3f3f", "serving.knative.dev/revision": "x-00001"}
    metadata = {"name": "x-00001-private-abc", "namespace": "kelvin-acme", "labels": labels}
    return {"metadata": metadata, "endpoints": list(endpoints) or None, "ports": list(ports) or None}


def endpoint(name: str = "pod-a", address: str = "10.0.0.1", **conditions: Any) -> dict[str, Any]:
    """Return the endpoint of a pod."""
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": name}}


@pytest.mark.parametrize(
    ("obj", "want"),
    [
        pytest.param(knative_service(), Service(OF, 8, "", ""), id="just created: no status"),
        pytest.param(
            knative_service(status("Unknown", "RevisionMissing", latestCreatedRevisionName="r-1")),
            Service(OF, 8, "r-1", ""),
            id="its first revision starts",
        ),
        pytest.param(
            knative_service(status("True", latestCreatedRevisionName="r-2", latestReadyRevisionName="r-1")),
            Service(OF, 8, "r-2", "r-1"),
            id="a new revision starts beside the one that serves",
        ),
        pytest.param(
            knative_service(status("False", "RevisionFailed")),
            Service(OF, 8, "", "", refused="RevisionFailed"),
            id="no revision could be created",
        ),
        pytest.param(
            knative_service(status("True", latestReadyRevisionName="r-1"), deletionTimestamp="2026-11-20T10:17:24Z"),
            Service(OF, 8, "", "r-1", is_being_deleted=True),
            id="being deleted",
        ),
        pytest.param(knative_service(labels={"kelvin.dev/tenant": "acme"}), None, id="foreign: no model label"),
        pytest.param(knative_service(annotations=None), None, id="foreign: no version annotation"),
    ],
)
def test_service_names_version_and_revisions(obj: dict[str, Any], want: Service | None) -> None:
    assert parse_service(obj) == want


@pytest.mark.parametrize(
    ("obj", "want"),
    [
        pytest.param(endpoint_slice(ports=()), (), id="no pod yet: neither endpoints nor ports"),
        pytest.param(
            endpoint_slice(endpoint(ready=True, serving=True, terminating=False)),
            (Pod("pod-a", "http://10.0.0.1:8012", is_ready=True, is_leaving=False),),
            id="a ready pod",
        ),
        pytest.param(
            endpoint_slice(endpoint(ready=False, serving=False, terminating=False)),
            (Pod("pod-a", "http://10.0.0.1:8012", is_ready=False, is_leaving=False),),
            id="a pod with an address that is not ready",
        ),
        pytest.param(
            endpoint_slice(endpoint(ready=False, serving=True, terminating=True)),
            (Pod("pod-a", "http://10.0.0.1:8012", is_ready=False, is_leaving=True),),
            id="a terminating pod",
        ),
        pytest.param(
            endpoint_slice(endpoint()),
            (Pod("pod-a", "http://10.0.0.1:8012", is_ready=True, is_leaving=False),),
            id="a missing ready condition means ready",
        ),
        pytest.param(
            endpoint_slice(endpoint(address="fd00::7", ready=True), ports=[{"name": "http2", "port": 8013}]),
            (Pod("pod-a", "http://[fd00::7]:8013", is_ready=True, is_leaving=False),),
            id="IPv6, and the port of HTTP/2",
        ),
        pytest.param(endpoint_slice(endpoint(), ports=[{"name": "https", "port": 8112}]), (), id="no HTTP port"),
        pytest.param(endpoint_slice({"addresses": ["10.0.0.9"], "conditions": {}}), (), id="an address of no pod"),
    ],
)
def test_slice_pods_have_queue_proxy_addresses(obj: dict[str, Any], want: tuple[Pod, ...]) -> None:
    assert parse_slice_pods(obj) == SlicePods("llama-3f3f3f3f3f3f", want)


def test_foreign_slice_is_ignored() -> None:
    """It belongs to no Knative Service."""
    assert parse_slice_pods({"metadata": {"name": "kube-dns", "labels": None}, "endpoints": []}) is None


def test_replica_rows_show_pod_state() -> None:
    """A pod that is not ready is unproven. A pod that leaves, or whose Service does, drains."""
    service, place = Service(OF, 8, "r-2", "r-1"), ("kelvin-acme", "llama-3f3f3f3f3f3f")
    row = revision_row(service, place)
    assert row is not None
    assert (row.tenant, row.model, row.version, row.namespace, row.name) == (
        "acme", "llama", DIGEST, "kelvin-acme", "r-1",
    )  # fmt: skip
    assert revision_row(Service(OF, 8, "", ""), place) is None
    assert revision_row(Service(OF, 8, "r-1", "r-1", is_being_deleted=True), place) is None
    shown = {
        (ready, leaving, going): replica_row(
            Service(OF, 8, "r-1", "r-1", is_being_deleted=going), Pod("p", "u", ready, leaving)
        )
        for ready in (False, True)
        for leaving in (False, True)
        for going in (False, True)
    }
    for (ready, leaving, going), replica in shown.items():
        assert replica.draining == (leaving or going)
        assert replica.unproven == (not ready and not replica.draining)
        assert (replica.runtime_id, replica.url, replica.address, replica.max_streams) == ("p", "u", "", 8)


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("ImagePullBackOff", "image"),
        ("ContainerMissing", "image"),
        ("ProgressDeadlineExceeded", "in time"),
        ("Unschedulable", "no node"),
        ("ExitCode137", "ended with 137"),
        ("SomethingNew", "could not start"),
    ],
)
def test_unknown_reasons_are_not_repeated(reason: str, says: str) -> None:
    """Known reasons become our own sentences. An unknown reason is not shown."""
    assert says in describe_reason(reason)
    assert "SomethingNew" not in describe_reason(reason)


@pytest.mark.skipif(not RECORDED.exists(), reason="the recordings are not in the repository")
def test_recorded_failures_are_parsed() -> None:
    """Each failed scenario gives the reasons of its revisions. The others give none."""
    found = {}
    for scenario in json.loads((RECORDED / "states_failing.json").read_text()):
        seen = [
            parse_revision_failure({"status": {"conditions": each["conditions"]}})
            for each in scenario["timeline"]
            if each["kind"] == "Revision"
        ]
        found[scenario["scenario"]] = {each.reason for each in seen if each is not None}
    assert found == {
        "never_ready_progress_deadline_15s_then_fixed": {"ProgressDeadlineExceeded"},
        "never_ready_min_scale_1": {"ProgressDeadlineExceeded"},
        "image_pull_backoff": {"ImagePullBackOff"},
        "crash_loop_exit_1": {"ExitCode1"},
        "terminated_exit_1": {"ProgressDeadlineExceeded"},
        "oom_killed_restarted": {"ExitCode137"},
        "unschedulable": {"Unschedulable"},
        "traffic_to_missing_revision": set(),
        "image_not_resolvable": {"ContainerMissing"},
        "custom_class_nobody_reconciles": set(),
        "ready_then_image_update_that_never_gets_ready": set(),
    }
    assert parse_revision_failure({"status": status("False", "ExitCode1")}) == RevisionFailure(
        "ExitCode1", "2026-11-20T10:17:24Z"
    )


@pytest.mark.parametrize("note", [None, "", "many", "-8", "8.5", 8, "9" * 30])
def test_invalid_streams_annotation_counts_as_zero(note: object) -> None:
    """Parsing does not fail."""
    notes = {"kelvin.dev/version": DIGEST, "kelvin.dev/streams": note}
    found = parse_service(knative_service(annotations=notes))
    assert found is not None
    assert found.max_streams == 0
