"""Parse the status of a version's cluster objects: its serving revision, its pods, and why none starts.

Reads Knative Services, their Revisions, and the EndpointSlices of their private services, which list every pod with the
port of its queue-proxy. Messages of objects are not passed on: they name pods, images and nodes.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from controlplane.knative.policy.object_labels import MODEL, STREAMS, TENANT, VERSION, NamespacedName
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.policy.start_problem import crash_loop
from kelvin.contracts.serving.control_messages import ReplicaRow, RevisionRow
from kelvin.contracts.traffic_errors import StartFailed, StartReason

Json = Mapping[str, Any]

PRIVATE_SLICES: Final = "networking.internal.knative.dev/serviceType=Private"  # selector of the slices that name pods

UNSCHEDULABLE: Final = "Unschedulable"  # reason of a pod, and of its Revision: no node has room for it

_PORTS: Final = ("http", "http2")  # Knative's names of the port for requests
_DESCRIPTIONS: Final = {
    "ContainerMissing": "its image can't be pulled",
    "ErrImagePull": "its image can't be pulled",
    "ImagePullBackOff": "its image can't be pulled",
    "InvalidImageName": "its image can't be pulled",
    "CreateContainerConfigError": "a secret or a config map that its pod needs is missing",
    "FailedCreate": "the cluster refuses its pods",
    "ProgressDeadlineExceeded": "none was ready in time",
    UNSCHEDULABLE: "no node has room for it",
}
_REASONS: Final[Mapping[str, StartReason]] = {
    "ContainerMissing": "no_image",
    "ErrImagePull": "no_image",
    "ImagePullBackOff": "no_image",
    "InvalidImageName": "no_image",
    "CreateContainerConfigError": "missing_secret",
    "FailedCreate": "refused_object",
    UNSCHEDULABLE: "no_room",
}
CRASH_LOOP: Final = "CrashLoopBackOff"
POD_PROBLEM_REASONS: Final = frozenset({CRASH_LOOP, *_REASONS} - {UNSCHEDULABLE, "FailedCreate", "ContainerMissing"})


@dataclass(frozen=True, slots=True)
class Service:
    """A version's Knative Service. A revision is "" if there is none yet."""

    key: VersionKey
    max_streams: int
    latest_created: str  # its latest revision
    ready: str  # the latest revision that was ready
    refused: str = ""  # why not even a revision could be created
    is_being_deleted: bool = False  # it is being deleted, and its pods with it

    @property
    def serving(self) -> str:
        """Return the revision that serves requests, or will."""
        return self.ready or self.latest_created


@dataclass(frozen=True, slots=True)
class RevisionFailure:
    """Why no replica of a revision came up: one word, and the time of that condition."""

    reason: str
    since: str


@dataclass(frozen=True, slots=True)
class Pod:
    """A replica and its URL."""

    name: str
    url: str
    is_ready: bool
    is_leaving: bool


@dataclass(frozen=True, slots=True)
class SlicePods:
    """The pods of one slice, and the Service that they belong to."""

    service: str
    pods: tuple[Pod, ...]


def parse_service(obj: Json) -> Service | None:
    """Parse a Knative Service. Return None if its labels don't name a version."""
    metadata = obj["metadata"]
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if not (labels.get(TENANT) and labels.get(MODEL) and annotations.get(VERSION)):
        return None
    status = obj.get("status") or {}
    latest_created = status.get("latestCreatedRevisionName") or ""
    ready = condition(obj, "Ready")
    refused = "" if latest_created or ready.get("status") != "False" else str(ready.get("reason") or "Unknown")
    return Service(
        VersionKey(labels[TENANT], labels[MODEL], annotations[VERSION]),
        _count(annotations.get(STREAMS)),
        latest_created,
        status.get("latestReadyRevisionName") or "",
        refused,
        "deletionTimestamp" in metadata,
    )


def _count(note: object) -> int:
    """Parse a count; 0 if it is malformed. Our next apply corrects a value that someone else wrote."""
    return int(note) if isinstance(note, str) and re.fullmatch(r"[0-9]{1,6}", note) else 0


def parse_revision_failure(obj: Json) -> RevisionFailure | None:
    """Return why a Revision has failed; None if it has not."""
    ready = condition(obj, "Ready")
    if ready.get("status") != "False":
        return None
    return RevisionFailure(str(ready.get("reason") or "Unknown"), str(ready.get("lastTransitionTime") or ""))


def parse_slice_pods(obj: Json) -> SlicePods | None:
    """Return the pods of an EndpointSlice; None if it does not belong to a Knative Service."""
    service = (obj["metadata"].get("labels") or {}).get("serving.knative.dev/service")
    if not service:
        return None
    ports = {each.get("name"): each.get("port") for each in obj.get("ports") or ()}
    port = next((ports[name] for name in _PORTS if ports.get(name)), None)
    found = () if port is None else tuple(_pods(obj.get("endpoints") or (), port))
    return SlicePods(service, found)


def condition(obj: Json, kind: str) -> Json:
    """Return the status condition of that type; empty if there is none."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == kind), {})


def parse_time_s(text: object) -> float | None:
    """Parse a time of the cluster, such as a condition's `lastTransitionTime`, as Unix time; None if malformed."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return None


def describe_reason(reason: str) -> str:
    """Return why no replica came up, in words for callers."""
    if (status := re.fullmatch(r"ExitCode([0-9]{1,3})", reason)) is not None:
        return f"its process ended with {status[1]}"
    return _DESCRIPTIONS.get(reason, "the cluster could not start it")


def start_failure(reason: str, exit_status: int | None = None) -> StartFailed:
    """Return the failure of a version without a replica, from the cluster's reason (one word)."""
    if reason == CRASH_LOOP:
        return crash_loop(exit_status)
    if (status := re.fullmatch(r"ExitCode(\d{1,3})", reason)) is not None:
        return StartFailed(describe_reason(reason), "crash_loop", exit_status_of(int(status[1])))
    return StartFailed(describe_reason(reason), _REASONS.get(reason, "failed"))


def exit_status_of(code: int) -> int:
    """Convert a container's exit code to `Popen.returncode`: above 128 it is a signal."""
    return 128 - code if 128 < code < 255 else code


def revision_row(service: Service, object_name: NamespacedName) -> RevisionRow | None:
    """Return the revision for which Knative's autoscaler takes reports; None if there is none, or not for long."""
    if service.is_being_deleted or not service.serving:
        return None
    key = service.key
    return RevisionRow(
        tenant=key.tenant, model=key.model, version=key.version, namespace=object_name[0], name=service.serving
    )


def replica_row(service: Service, pod: Pod) -> ReplicaRow:
    """Return the feed row of a pod: what activators know of it."""
    return ReplicaRow(
        runtime_id=pod.name,
        tenant=service.key.tenant,
        model=service.key.model,
        version=service.key.version,
        address="",
        max_streams=service.max_streams,
        draining=pod.is_leaving or service.is_being_deleted,
        restore=(),
        url=pod.url,
        unproven=not (pod.is_ready or pod.is_leaving or service.is_being_deleted),
    )


def _pods(endpoints: Any, port: int) -> Iterator[Pod]:
    for each in endpoints:
        target = each.get("targetRef") or {}
        if target.get("kind") != "Pod" or not target.get("name") or not each.get("addresses"):
            continue
        states = each.get("conditions") or {}
        address = each["addresses"][0]
        host = f"[{address}]" if ":" in address else address
        # Missing readiness means true (EndpointConditions, k8s.io/api/discovery/v1).
        yield Pod(
            target["name"], f"http://{host}:{port}", states.get("ready") is not False, states.get("terminating") is True
        )
