"""The recorded answers of Knative's webhooks, against ours: defaults, refusals, warnings, flags, updates."""

from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.cluster.answers import Json
from tests.cluster.api_server import ApiServer, serving
from tests.cluster.recordings import (
    NAMESPACE,
    Client,
    Names,
    compared,
    differences,
    needs_recordings,
    recorded,
    warnings,
)

pytestmark = needs_recordings

VALIDATION: Final[list[Json]] = recorded("webhook_validation.jsonl")
FLAGS: Final[list[Json]] = recorded("feature_flags.json")
DEFAULTS: Final[list[Json]] = recorded("webhook_defaults.json")
DIFFERS: Final[list[Json]] = recorded("webhook_dry_run_differs.json")
UPDATES: Final[list[Json]] = recorded("webhook_updates.json")
SAME: Final = "$same-as-baseline_accepted"
# The difference of two pod specs is printed as Go prints structs: the first line of the message is compared.
FIRST_LINE_ONLY: Final = ("template_changed_same_name",)
NOT_IMITATED: Final[dict[str, str]] = {
    "podautoscalers_after_class_change": "what Knative's controllers made",
    "service_with_custom_class_no_controller": "what Knative's controllers made",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with serving() as server, server.no_collector():
        server.namespace(NAMESPACE)
        yield server


@pytest.fixture(scope="module")
def client(server: ApiServer) -> Iterator[Client]:
    with Client(server) as client:
        yield client


def whole(row: Json) -> Json:
    """A row with the warning that it only refers to."""
    headers = dict(row["response"]["headers"])
    if headers.get("warning") == SAME:
        headers["warning"] = VALIDATION[0]["response"]["headers"]["warning"]
    return row | {"response": row["response"] | {"headers": headers}}


@pytest.mark.parametrize("row", [pytest.param(each, id=each["name"]) for each in VALIDATION])
def test_validation(client: Client, row: Json) -> None:
    """Accepted with these defaults, or refused with this text."""
    row, said, names = whole(row), client.send(row["request"]), Names()
    if not row["accepted"]:
        assert compared(row, said, names) == []
        return
    assert said.status == row["response"]["status"], said.body
    assert warnings(said.headers) == warnings(row["response"]["headers"])
    kept = {
        "spec.template": said.body["spec"]["template"],
        "metadata.annotations": said.body["metadata"]["annotations"],
    }
    assert differences(row["response"]["body"], kept, names) == []


@pytest.mark.parametrize(
    "row", [pytest.param(each, id=f"{each['name']}-{'-'.join(each['flags'].values())}") for each in FLAGS]
)
def test_flags(server: ApiServer, client: Client, row: Json) -> None:
    """What a flag of config-features lets pass, and what is said where it doesn't."""
    (asked,) = (each for each in VALIDATION if each["name"] == row["name"])
    server.features.update(row["flags"])
    try:
        said = client.send(asked["request"])
    finally:
        server.features.clear()
    assert said.status == row["status"], said.body
    if row["message"]:
        assert differences(row["message"], said.body["message"], Names()) == []


@pytest.mark.parametrize("row", [pytest.param(each, id=each["name"]) for each in DEFAULTS])
def test_defaults(client: Client, row: Json) -> None:
    """The object as it is stored."""
    assert compared(row, client.send(row["request"]), Names()) == []


@pytest.mark.parametrize("row", [pytest.param(each, id=each["name"]) for each in DIFFERS])
def test_without_dry_run(client: Client, row: Json) -> None:
    """What only a dry run refuses is created."""
    assert client.send(row["request"]).status == row["response"]["status"]


def controllers(server: ApiServer, names: Names) -> None:
    """The Configuration and the Revision that the controllers had made of `llama-min`, as recorded before a change."""
    answers = {each["name"]: each["response"]["body"] for each in UPDATES}
    revision, configuration = answers["revision_annotation_may_change"], answers["child_configuration_edited"]
    for each, without in ((configuration, None), (revision, "kelvin.dev/note")):
        metadata = {key: each["metadata"][key] for key in ("name", "namespace", "labels", "annotations")}
        metadata["annotations"] = {key: value for key, value in metadata["annotations"].items() if key != without}
        owners = names.translated(each["metadata"]["ownerReferences"])
        spec = dict(each["spec"])
        if "template" in spec:
            spec = {"template": spec["template"] | {"spec": spec["template"]["spec"] | {"timeoutSeconds": 300}}}
        made = {"apiVersion": each["apiVersion"], "kind": each["kind"], "spec": spec, "status": each.get("status", {})}
        created = server.create(made | {"metadata": metadata | {"ownerReferences": owners}})
        names.learn(each["metadata"]["uid"], created["metadata"]["uid"])


def test_updates() -> None:
    """What may be changed of what exists, and which PodAutoscalers are accepted."""
    found: dict[str, Any] = {}
    names = Names()
    with serving() as server, server.no_collector(), Client(server) as client:
        server.namespace(NAMESPACE)
        minimal = DEFAULTS[0]
        made = server.create(minimal["request"]["body"])
        names.learn(minimal["response"]["body"]["metadata"]["uid"], made["metadata"]["uid"])
        controllers(server, names)
        for each in UPDATES:
            if each["name"] in NOT_IMITATED:
                continue
            if isinstance(status := each["response"]["body"].get("status"), dict):
                body = each["response"]["body"]
                about = server.get(body["apiVersion"], body["kind"], body["metadata"]["name"], NAMESPACE)
                server.set_status(about, status, manager="knative-controller")
            said = client.send(each["request"])
            want = each
            if each["name"] in FIRST_LINE_ONLY:
                message = each["response"]["body"]["message"].splitlines()[0]
                want = each | {"response": each["response"] | {"body": each["response"]["body"] | {"message": message}}}
                said.body["message"] = said.body["message"].splitlines()[0]
            if faults := compared(want, said, names):
                found[each["name"]] = faults
    assert found == {}
