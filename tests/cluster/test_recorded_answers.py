"""Recorded exchanges with a real API server, replayed against ours: the parts that the product relies on.

The exchanges in `data` are from kube-apiserver 1.36.2 with Knative Serving's webhooks, in recorded order. Recordings
that are not here are not imitated.
"""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from tests.cluster.kube_api import deletions, field_ownership, object_storage
from tests.cluster.kube_api.api_server import ApiServer, serving
from tests.cluster.kube_api.recordings import (
    NAMESPACE,
    Client,
    ExchangeReplay,
    NameMapping,
    compared,
    copied,
    differences,
)
from tests.cluster.kube_api.status_answers import Json, Refused

EXCHANGES: Final = copied("exchanges")
WEBHOOK: Final = copied("webhook")
PACE: Final = 0.05  # real length of a second of a watch's timeout


@contextmanager
def replaying(before: dict[str, Callable[[ExchangeReplay], None]] | None = None) -> Iterator[ExchangeReplay]:
    """Yield a replay in which each write has its own second. A write that changes nothing keeps the earlier time."""
    seconds = itertools.count()
    with pytest.MonkeyPatch.context() as patch, serving() as server, server.no_collector(), Client(server) as client:
        patch.setattr(object_storage, "now", lambda: f"2026-01-01T00:00:{next(seconds) % 60:02d}Z")
        server.namespace(NAMESPACE)
        yield ExchangeReplay(server, client, before)


def test_recorded_exchanges_are_answered_alike() -> None:
    """They cover apply, conflicts, refusals, merge patches, deletions and Leases: status, message, details and body."""
    with replaying() as replay:
        assert replay.all(EXCHANGES) == {}


def test_further_exchanges_are_answered_alike() -> None:
    """They cover quantities and empty maps in an apply, selectors, missing namespaces and discovery."""
    with replaying() as replay:
        assert replay.all(copied("more")) == {}


def test_finalizer_exchanges_and_events_match() -> None:
    """The exchanges match, and so do the events of a watch."""
    collect: Callable[[ExchangeReplay], None] = lambda replay: replay.server.collect()  # noqa: E731
    with replaying({"owner_waits_for_owned": collect, "owned_gone": collect}) as replay:
        kind, store = replay.server.cluster.kinds.of("v1", "ConfigMap"), replay.server.cluster.store
        watch = replay.server.cluster.watch(kind, NAMESPACE, {"resourceVersion": str(store.version)})
        assert replay.all(copied("finalizers")) == {}
        replay.server.collect()
        events, wanted = watch.due(), copied("finalizer_events")
        wanted = [{"type": each["type"], "object": each["object"]} for each in wanted]
        began = [each["type"] for each in events].index("ADDED") + 1  # the recorded watch began after the owner's event
        assert differences(wanted, events[began : began + len(wanted)], replay.names) == []


@pytest.mark.parametrize("row", [pytest.param(each, id=each["id"]) for each in WEBHOOK])
def test_webhook_answers_match(row: Json, knative: ExchangeReplay) -> None:
    """A Service is accepted with these defaults or refused with this text, by the flags of config-features."""
    server = knative.server
    server.features.update(row.get("flags", {}))
    try:
        response = knative.client.send(row["request"])
    finally:
        server.features.clear()
    assert response.status == row["status"], response.body
    if response.status == 201:
        server.delete(response.body)
        server.collect()
    if row["status"] != 201:
        assert differences(row["message"], response.body["message"], NameMapping()) == []
    elif "template" in row:
        assert differences(row["template"], response.body["spec"]["template"], NameMapping()) == []


@pytest.fixture(scope="module")
def knative() -> Iterator[ExchangeReplay]:
    with replaying() as replay:
        yield replay


# -- lists and watches


def config_map(name: str, data: Json | None = None, **metadata: Any) -> Json:
    about = {"name": name, "namespace": NAMESPACE} | metadata
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about} | ({"data": data} if data else {})


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """An API server with one namespace, its usual objects and five pages."""
    with serving() as server:
        server.namespace(NAMESPACE)
        for each in copied("lists")[0]["response"]["body"]["items"]:
            about = each["metadata"]
            server.create(config_map(about["name"], each["data"], annotations=about["annotations"]))
        for index in range(5):
            server.create(config_map(f"page-{index}", {"i": str(index)}))
        yield server


@pytest.fixture
def client(server: ApiServer) -> Iterator[Client]:
    with Client(server) as client:
        yield client


def page(server: ApiServer, index: int = 0) -> Json:
    return server.get("v1", "ConfigMap", f"page-{index}", NAMESPACE)


def test_list_pages_match(server: ApiServer, client: Client) -> None:
    """They cover limits, continue tokens and their expiry."""
    names, found = NameMapping(), {}
    for each in copied("lists"):
        if each["name"] == "list_continue_expired":
            server.change(page(server), {"data": {"n": "3"}})
            server.expire()
        if faults := compared(each, client.send(names.translated(each["request"])), names):
            found[each["name"]] = faults
    assert found == {}


def touch(value: str) -> Callable[[ApiServer], object]:
    return lambda server: server.change(page(server), {"data": {"n": value}})


def set_label(server: ApiServer) -> None:
    server.change(page(server, 1), {"metadata": {"labels": {"sel": "yes"}}})
    server.change(page(server, 1), {"data": {"z": "1"}})
    server.change(page(server, 1), {"metadata": {"labels": None}})


# Events during the recorded watch.
MEANWHILE: Final[dict[str, Callable[[ApiServer], object]]] = {
    "timeout_seconds_2": touch("1"),
    "label_selector_enter_change_leave": set_label,
    "added_deleted": lambda server: server.delete(server.create(config_map("short"))),
}


@pytest.mark.parametrize("watch", [pytest.param(each, id=each["name"]) for each in copied("watches")])
def test_watch_events_match(server: ApiServer, client: Client, watch: Json) -> None:
    """The status, the events in their order, and the end of the stream match."""
    name, query = watch["name"], dict(watch["request"]["query"])
    server.front.pace = PACE
    if query.get("resourceVersion") != "1":  # too old
        query["resourceVersion"] = str(server.cluster.store.version)
    happening = threading.Timer(PACE, MEANWHILE.get(name, lambda _: None), (server,))
    happening.start()
    response = client.send(watch["request"] | {"query": query})
    happening.join()
    assert response.status == watch["response"]["status"]
    wanted = [{"type": each["type"], "object": each["object"]} for each in watch["events"]]
    events = [json.loads(line) for line in response.body.splitlines()]
    for each in events:
        if each["type"] == "ERROR":  # "too old resource version: 1 (3284)": the second number depends on the cluster
            each["object"]["message"] = each["object"]["message"].partition(" (")[0] + " (3284)"
    assert differences(wanted, events, NameMapping()) == []


# -- negative controls


def broken_generation(_kind: object, obj: Json) -> Json:
    return obj["metadata"]  # type: ignore[no-any-return]


BROKEN: Final[list[Any]] = [
    pytest.param(
        object_storage, "_specified", broken_generation, "apply_change_label_only", id="labels bump the generation"
    ),
    pytest.param(field_ownership, "check", lambda *_: [], "apply_unknown_field_strict", id="an apply is not typed"),
    pytest.param(
        field_ownership, "_pruned", lambda _, new, *__: new, "apply_remove_owned_field", id="no field is removed"
    ),
    pytest.param(
        field_ownership,
        "conflicting",
        lambda _: Refused(409, {"message": "", "code": 409}),
        "apply_other_manager_conflict",
        id="conflicts have no message",
    ),
    pytest.param(deletions, "_check", lambda *_: [], "delete_precondition_uid_conflict", id="every uid is accepted"),
    pytest.param(object_storage, "accept", lambda *_, **__: None, "create_bad_name", id="every name is accepted"),
]


@pytest.mark.parametrize(("module", "name", "broken", "found"), BROKEN)
def test_a_broken_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, broken: Callable[..., Any], found: str
) -> None:
    """Negative control: the exchange of that rule differs."""
    monkeypatch.setattr(module, name, broken)
    with replaying() as replay:
        for each in EXCHANGES:
            faults = replay.step(each)
            if each["name"] == found:
                break
        assert faults
