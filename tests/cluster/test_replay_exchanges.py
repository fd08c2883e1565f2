"""The recorded exchanges about a Knative Service and a Lease against ours, in order: apply, patch, update, delete."""

import itertools
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests.cluster import cluster
from tests.cluster.answers import Json
from tests.cluster.api_server import serving
from tests.cluster.recordings import NAMESPACE, Client, Replay, needs_recordings, recorded

pytestmark = needs_recordings

SERVING: Final = "serving.knative.dev/v1"
NAME: Final = "llama-3f2a91c0b7de"
# The recorder kept a body that it changed for the next request: these are what was sent.
SENT: Final[dict[str, Callable[[Json], Json]]] = {
    "apply_with_stale_resource_version": lambda body: (
        body
        | {
            "metadata": {
                **{key: body["metadata"][key] for key in ("name", "namespace", "labels")},
                "resourceVersion": "1",
            }
        }
    ),
}


def recorded_body(name: str) -> Json:
    (found,) = (each for each in EXCHANGES if each["name"] == name)
    body: Json = found["response"]["body"]
    return body


def with_configuration(replay: Replay, name: str) -> None:
    """A Service that the recorder created on the side, with the Configuration that the controllers make of it."""
    (applied,) = (each for each in EXCHANGES if each["name"] == "apply_create")
    about = {"name": name, "namespace": NAMESPACE}
    made = replay.server.create(applied["request"]["body"] | {"metadata": about})
    recorded_one = recorded_body("owned_configuration_2s_after_delete_orphan")
    (owner,) = recorded_one["metadata"]["ownerReferences"]
    if recorded_one["metadata"]["name"] == name:
        replay.names.learn(owner["uid"], made["metadata"]["uid"])
    metadata = {key: recorded_one["metadata"][key] for key in ("annotations", "labels")} | about
    metadata["ownerReferences"] = [owner | {"name": name, "uid": made["metadata"]["uid"]}]
    configuration = {"apiVersion": SERVING, "kind": "Configuration", "metadata": replay.names.translated(metadata)}
    replay.server.create(configuration | {"spec": recorded_one["spec"], "status": recorded_one["status"]})


BEFORE: Final[dict[str, Callable[[Replay], None]]] = {
    "delete_background": lambda replay: with_configuration(replay, "llama-bg"),
    "owned_configuration_2s_after_delete_background": lambda replay: replay.server.collect(),
    "delete_orphan": lambda replay: with_configuration(replay, "llama-orphan"),
    "delete_default": lambda replay: with_configuration(replay, "llama-default"),
    "owned_configuration_2s_after_delete_default": lambda replay: replay.server.collect(),
}
EXCHANGES: Final[list[Json]] = recorded("api_exchanges.json")
LEASES: Final[list[Json]] = recorded("leases.json")


@pytest.fixture(scope="module")
def replay() -> Iterator[Replay]:
    """Each write has a second of its own: one that changes nothing keeps the time of the one before."""
    seconds = itertools.count()
    with pytest.MonkeyPatch.context() as patch, serving() as server, server.no_collector(), Client(server) as client:
        patch.setattr(cluster, "now", lambda: f"2026-01-01T00:00:{next(seconds) % 60:02d}Z")
        server.namespace(NAMESPACE)
        yield Replay(server, client, SENT, BEFORE)


@pytest.mark.parametrize("exchanges", [pytest.param(EXCHANGES, id="exchanges"), pytest.param(LEASES, id="leases")])
def test_replay(replay: Replay, exchanges: list[Json]) -> None:
    """Status, reason, message, details, warnings and body are those of the real server."""
    assert replay.all(exchanges) == {}
