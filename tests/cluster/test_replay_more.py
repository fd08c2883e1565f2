"""The other recorded exchanges against ours: quantities, sizes, namespaces, discovery, finalizers and their events."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from tests.cluster.answers import Json
from tests.cluster.api_server import serving
from tests.cluster.recordings import NAMESPACE, Client, Replay, differences, needs_recordings, recorded

pytestmark = needs_recordings

MORE: Final[list[Json]] = recorded("api_more.json")
FINALIZERS: Final[Any] = recorded("finalizers.json") or {"exchanges": [], "watch_events": []}
NO_DEPLOYMENTS: Final = "there are neither Deployment's defaults and rules nor its scale"
NOT_IMITATED: Final[dict[str, str]] = {
    "deployment_apply_immutable_selector": NO_DEPLOYMENTS,
    "deployment_apply_after_scale_conflict": NO_DEPLOYMENTS,
    "deployment_apply_without_replicas_keeps_scaled_value": NO_DEPLOYMENTS,
    "scale_get": NO_DEPLOYMENTS,
    "scale_merge_patch": NO_DEPLOYMENTS,
    "scale_put_stale": NO_DEPLOYMENTS,
    "scale_negative": NO_DEPLOYMENTS,
    "discovery_version": "the commit and the date of a build",
    "dangling_owner_collected_after_s": "no exchange: that it is collected is among the events",
}
# What of an answer is compared, where it isn't all.
PARTLY: Final[dict[str, Callable[[Json], Json]]] = {
    "deployment_apply_create": lambda body: {"managedFields": body["metadata"]["managedFields"]},
}
MAP: Final[Json] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "big"}}


def annotated() -> Json:
    (created,) = (each for each in MORE if each["name"] == "integer_quantities_create")
    body: Json = created["request"]["body"]
    metadata = {"name": "llama-big", "namespace": NAMESPACE, "annotations": {"kelvin.dev/big": "x" * 300000}}
    return body | {"metadata": metadata}


# Bodies that the recorder only described, or changed for its next request.
SENT: Final[dict[str, Callable[[Json], Json]]] = {
    "configmap_over_1_mib": lambda _: MAP | {"data": {"x": "x" * 1126400}},
    "body_over_3_mib": lambda _: MAP | {"data": {"x": "x" * 4194304}},
    "annotations_over_256_kib": lambda _: annotated(),
    "create_finalizer_not_qualified": lambda body: body | {"metadata": {"name": "bad", "finalizers": ["notqualified"]}},
}
BEFORE: Final[dict[str, Callable[[Replay], None]]] = {
    "owner_waits_for_owned": lambda replay: replay.server.collect(),
    "owned_gone": lambda replay: replay.server.collect(),
}


@pytest.fixture
def replay() -> Iterator[Replay]:
    with serving() as server, server.no_collector(), Client(server) as client:
        server.namespace(NAMESPACE)
        server.namespace("kelvin-temp")
        yield Replay(server, client, SENT, BEFORE, PARTLY)


def imitated(exchanges: list[Json]) -> list[Json]:
    return [each for each in exchanges if each["name"] not in NOT_IMITATED]


def test_more(replay: Replay) -> None:
    """Status, reason, message, details, warnings and body are those of the real server."""
    assert replay.all(imitated(MORE)) == {}


def test_finalizers(replay: Replay) -> None:
    """The exchanges, and then the events that a watch was told."""
    kind = replay.server.kind(MAP)
    watch = replay.server.cluster.watch(kind, NAMESPACE, {"resourceVersion": str(replay.server.cluster.store.version)})
    exchanges, events = imitated(FINALIZERS["exchanges"]), FINALIZERS["watch_events"]
    assert replay.all(exchanges) == {}
    replay.server.collect()
    told = watch.due()
    wanted = [{"type": each["type"], "object": each["object"]} for each in events]
    began = [each["type"] for each in told].index("ADDED") + 1  # the recorded watch began after the owner's
    assert differences(wanted, told[began : began + len(wanted)], replay.names) == []
