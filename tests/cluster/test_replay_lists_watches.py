"""The recorded lists with their pages, and the recorded watches, against ours."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from tests.cluster.answers import Json
from tests.cluster.api_server import ApiServer, serving
from tests.cluster.recordings import NAMESPACE, Client, Names, compared, differences, needs_recordings, recorded

pytestmark = needs_recordings

PAGES: Final[list[Json]] = recorded("list_paging.json")
WATCHES: Final[list[Json]] = recorded("watch_semantics.json")
PACE: Final = 0.05  # how long a second of a watch's timeout lasts here
QUICK: Final = 0.01
NOT_IMITATED: Final[dict[str, str]] = {
    "resource_version_too_old_core": "the history of the recorded cluster; `test_api_server` shows that one is told",
}


def config_map(name: str, data: Json | None = None, **metadata: Any) -> Json:
    made: Json = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": NAMESPACE} | metadata,
    }
    return made | ({"data": data} if data else {})


def everyones() -> list[Json]:
    """What lies in a namespace from its beginning."""
    listed = [(each["metadata"], each["data"]) for each in PAGES[0]["response"]["body"]["items"]]
    return [config_map(about["name"], data, annotations=about["annotations"]) for about, data in listed]


@pytest.fixture
def client(server: ApiServer) -> Iterator[Client]:
    with Client(server) as client:
        yield client


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A namespace with what every namespace has, and five pages."""
    with serving() as server:
        server.namespace(NAMESPACE)
        for each in everyones():
            server.create(each)
        for index in range(5):
            server.create(config_map(f"page-{index}", {"i": str(index)}))
        yield server


def page(server: ApiServer, index: int = 0) -> Json:
    return server.get("v1", "ConfigMap", f"page-{index}", NAMESPACE)


def elsewhere(server: ApiServer) -> None:
    """Something of another kind happens: it takes a version, too."""
    about = {"generateName": "other-", "namespace": NAMESPACE}
    server.create({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": about})


def much_later(server: ApiServer) -> None:
    """Versions until then are compacted, and some objects changed."""
    server.change(page(server), {"data": {"n": "3"}})
    server.change(page(server, 1), {"data": {"z": "1"}})
    server.create(config_map("gen-frbzj", generateName="gen-"))
    elsewhere(server)
    server.expire()


BEFORE_PAGE: Final[dict[str, Callable[[ApiServer], None]]] = {"list_continue_expired": much_later}


def test_pages(server: ApiServer, client: Client) -> None:
    """Limits, continue tokens and their end, versions too old and too new."""
    names, found = Names(), {}
    for each in PAGES:
        if before := BEFORE_PAGE.get(each["name"]):
            before(server)
        request = names.translated(each["request"])
        if "1007701" in request["query"].values():
            current = server.cluster.store.version
            names.learn("7701", str(current))
            request["query"]["resourceVersion"] = str(current + 1_000_000)
            each = json.loads(
                json.dumps(each).replace("1007701", str(current + 1_000_000)).replace("7701", str(current))
            )
        faults = compared(each, client.send(request), names)
        if faults:
            found[each["name"]] = faults
    assert found == {}


def set_label(server: ApiServer) -> None:
    server.change(page(server, 1), {"metadata": {"labels": {"sel": "yes"}}})
    server.change(page(server, 1), {"data": {"z": "1"}})
    server.change(page(server, 1), {"metadata": {"labels": None}})


def touch(value: str) -> Callable[[ApiServer], None]:
    return lambda server: void(server.change(page(server), {"data": {"n": value}}))


def changed(server: ApiServer) -> None:
    touch("2")(server)
    elsewhere(server)


def void(_: Any) -> None:
    """For its effect."""


def short(server: ApiServer) -> None:
    server.delete(server.create(config_map("short")))


# What happened while the recorded watch was open.
MEANWHILE: Final[dict[str, Callable[[ApiServer], None]]] = {
    "timeout_seconds_2": touch("1"),
    "bookmark_before_timeout": touch("2"),
    "field_selector_name": touch("3"),
    "label_selector_enter_change_leave": set_label,
    "added_deleted": short,
}
# What had happened before it.
BEFORE_WATCH: Final[dict[str, Callable[[ApiServer], None]]] = {
    "no_resource_version": changed,
    "resource_version_0": changed,
    "send_initial_events": changed,
}


@pytest.mark.parametrize("watch", [pytest.param(each, id=each["name"]) for each in WATCHES])
def test_watch(server: ApiServer, client: Client, watch: Json) -> None:
    """The status, and the same events in the same order; then the end."""
    name, query = watch["name"], dict(watch["request"]["query"])
    if name == "resource_version_too_old_core":
        pytest.skip(NOT_IMITATED[name])
    server.front.pace = QUICK if int(query["timeoutSeconds"]) > 60 else PACE
    if before := BEFORE_WATCH.get(name):
        before(server)
    version = query.get("resourceVersion", "")
    if version.isdigit() and int(version) > 1:
        far = 1_000_000 if int(version) > 1_000_000 else 0
        query["resourceVersion"] = str(server.cluster.store.version + far)
    names = Names()
    happening = threading.Timer(PACE, MEANWHILE[name], (server,)) if name in MEANWHILE else None
    if happening is not None:
        happening.start()
    said = client.send(watch["request"] | {"query": query})
    if happening is not None:
        happening.join()
    assert said.status == watch["response"]["status"]
    if "body" in watch["response"]:
        assert differences(watch["response"]["body"], said.body, names) == []
        return
    assert said.headers["transfer-encoding"] == "chunked"
    wanted = [{"type": each["type"], "object": each["object"]} for each in watch["events"]]
    events = [json.loads(line) for line in said.body.splitlines()]
    assert _told(wanted, events, names) == []


def _told(want: list[Json], got: list[Json], names: Names) -> list[str]:
    oldest = [each for each in got if each["type"] == "ERROR"]
    for each in oldest:  # "too old resource version: 1 (3284)": the other number is the cluster's
        each["object"]["message"] = each["object"]["message"].partition(" (")[0] + " (3284)"
    return differences(want, got, names)
