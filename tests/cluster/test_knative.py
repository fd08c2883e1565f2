"""The emulation of Knative's controllers: what it makes of a Service, and in which order, held to a recorded life."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from tests.cluster.answers import Json
from tests.cluster.api_server import ApiServer
from tests.cluster.knative import Knative, address
from tests.cluster.knative_children import AUTOSCALING, NETWORKING, V1
from tests.cluster.knative_status import Failure, state
from tests.cluster.objects import Options
from tests.cluster.recordings import RECORDED, needs_recordings

NAMESPACE: Final = "kelvin-models"
NAME: Final = "llama-3f2a91c0b7de"
KINDS: Final = {
    "service": (V1, "Service"),
    "configuration": (V1, "Configuration"),
    "route": (V1, "Route"),
    "revision": (V1, "Revision"),
    "podautoscaler": (AUTOSCALING, "PodAutoscaler"),
    "serverlessservice": (f"{NETWORKING}/v1alpha1", "ServerlessService"),
}
SERVICE: Final[Json] = {
    "apiVersion": V1,
    "kind": "Service",
    "metadata": {"name": NAME, "namespace": NAMESPACE},
    "spec": {"template": {"spec": {"containers": [{"name": "runtime", "image": "dev.local/kelvin-runtime:1"}]}}},
}


@pytest.fixture
def knative(api_server: ApiServer) -> Knative:
    api_server.namespace(NAMESPACE)
    return Knative(api_server)


def applied(server: ApiServer, image: str = "dev.local/kelvin-runtime:1") -> None:
    """As the product applies it."""
    body = json.loads(json.dumps(SERVICE))
    body["spec"]["template"]["spec"]["containers"][0]["image"] = image
    server.cluster.apply(server.kind(body), NAMESPACE, NAME, body, Options("kelvin", force=True))


def endpoints(server: ApiServer, revision: str) -> list[tuple[str, bool]]:
    """The addresses in the slice of the private Service, and whether each is ready."""
    label = "serving.knative.dev/revision"
    slices = [
        each
        for each in server.objects("discovery.k8s.io/v1", "EndpointSlice", NAMESPACE)
        if each["metadata"]["labels"][label] == revision
    ]
    return [
        (found["addresses"][0], found["conditions"]["ready"])
        for each in slices
        for found in each.get("endpoints") or []
    ]


def ready(server: ApiServer) -> tuple[str, str]:
    return state(server.get(V1, "Service", NAME, NAMESPACE))[:2]


def test_a_service_gets_ready(api_server: ApiServer, knative: Knative) -> None:
    """With one pod, which can be reached at the address in the slice; held back as long as the test wants."""
    knative.hold(f"{NAME}-00001")
    applied(api_server)
    knative.settle()
    assert ready(api_server) == ("Unknown", "RevisionMissing")
    assert endpoints(api_server, f"{NAME}-00001") == [(address(0), False)]
    knative.start(f"{NAME}-00001")
    knative.settle()
    assert ready(api_server) == ("True", "")
    assert endpoints(api_server, f"{NAME}-00001") == [(address(0), True)]
    service = api_server.get(V1, "Service", NAME, NAMESPACE)
    assert service["status"]["latestReadyRevisionName"] == f"{NAME}-00001"


def test_it_is_scaled_and_updated(api_server: ApiServer, knative: Knative) -> None:
    """Up, to nothing, from nothing; then another image is another Revision, and the old one is still there."""
    applied(api_server)
    for replicas in (3, 0, 1):
        knative.settle()
        knative.scale(f"{NAME}-00001", replicas)
        knative.settle()
        assert len(endpoints(api_server, f"{NAME}-00001")) == replicas
        assert ready(api_server) == ("True", ""), "at zero, too"
    applied(api_server, "dev.local/kelvin-runtime:2")
    knative.settle()
    service = api_server.get(V1, "Service", NAME, NAMESPACE)
    assert service["status"]["traffic"][0]["revisionName"] == f"{NAME}-00002"
    assert [each["metadata"]["name"][-5:] for each in api_server.objects(V1, "Revision")] == ["00001", "00002"]


def test_a_revision_fails(api_server: ApiServer, knative: Knative) -> None:
    """The Service says so; after an update, the Revision that was ready still serves."""
    applied(api_server)
    knative.fail(f"{NAME}-00001", Failure("ImagePullBackOff", "Back-off pulling image"))
    knative.settle()
    assert ready(api_server) == ("False", "RevisionMissing")
    applied(api_server, "dev.local/kelvin-runtime:2")
    knative.settle()
    assert ready(api_server) == ("True", "")
    knative.fail(f"{NAME}-00003", Failure("ImagePullBackOff", "Back-off pulling image"))
    applied(api_server, "dev.local/kelvin-runtime:3")
    knative.settle()
    assert ready(api_server) == ("False", "RevisionFailed")
    service = api_server.get(V1, "Service", NAME, NAMESPACE)
    assert service["status"]["traffic"][0]["revisionName"] == f"{NAME}-00002"


def test_nothing_is_left(api_server: ApiServer, knative: Knative) -> None:
    """Of a Service that was deleted."""
    applied(api_server)
    knative.settle()
    api_server.delete(api_server.get(V1, "Service", NAME, NAMESPACE), "Foreground")
    knative.settle()
    left = [obj for _, obj in api_server.cluster.store.every() if obj["metadata"].get("namespace") == NAMESPACE]
    assert [(each["kind"], each["metadata"]["name"]) for each in left] == []


def test_it_runs_beside(api_server: ApiServer, knative: Knative) -> None:
    """While its block runs, nobody has to ask."""
    watch = api_server.cluster.watch(api_server.kind(SERVICE), NAMESPACE, {})
    with knative.running():
        applied(api_server)
        assert knative.wait(lambda: ready(api_server) == ("True", ""))
    told = [state(each["object"])[:2] for each in watch.due()]
    assert told[0] == ("Unknown", "")
    assert told[-1] == ("True", "")


def reader() -> ModuleType:
    """The reader that came with the recordings."""
    spec = importlib.util.spec_from_file_location("load_lifecycle", RECORDED / "recorder" / "load_lifecycle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def conditions(obj: Json) -> tuple[tuple[str, str, str], ...]:
    found = (obj.get("status") or {}).get("conditions") or []
    return tuple(sorted((each["type"], each["status"], each.get("reason", "")) for each in found))


def states(events: list[Any]) -> dict[str, list[Any]]:
    """By the end of an object's name: its conditions, each as long as it lasted."""
    found: dict[str, list[Any]] = {}
    for each in events:
        if each["type"] in ("ADDED", "MODIFIED"):
            name = each["object"]["metadata"]["name"].removeprefix(NAME)
            told = found.setdefault(name, [])
            if not told or told[-1] != conditions(each["object"]):
                told.append(conditions(each["object"]))
    return found


def unseen(short: list[Any], long: Iterator[Any]) -> Any:
    """The first that doesn't come in its turn; None if all do."""
    return next((each for each in short if not any(each == other for other in long)), None)


@needs_recordings
def test_the_order_is_the_recorded_one(api_server: ApiServer, knative: Knative) -> None:
    """Every state that an object shows was recorded, and those before it before it."""
    watches = {
        name: api_server.cluster.watch(api_server.cluster.kinds.of(*kind), NAMESPACE, {})
        for name, kind in KINDS.items()
    }
    steps: list[Callable[[], None]] = [
        lambda: applied(api_server),
        lambda: knative.scale(f"{NAME}-00001", 1),
        lambda: knative.scale(f"{NAME}-00001", 5),
        lambda: knative.scale(f"{NAME}-00001", 0),
        lambda: knative.scale(f"{NAME}-00001", 1),
        lambda: applied(api_server, "dev.local/kelvin-runtime:2"),
        lambda: knative.scale(f"{NAME}-00002", 1),
        lambda: knative.scale(f"{NAME}-00002", 0),
    ]
    knative.hold(f"{NAME}-00001")
    for step in steps:
        step()
        knative.settle()
        knative.start(f"{NAME}-00001")
        knative.settle()
    for name, watch in watches.items():
        theirs = states(list(reader().events(Path(RECORDED) / "lifecycle" / f"{name}.jsonl")))
        for which, ours in states(watch.due()).items():
            early = [unseen(ours, iter(each)) for each in theirs.values()]
            assert None in early, (name, which)
            assert len(ours) >= 2
