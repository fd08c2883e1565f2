"""Nothing recorded is silently left out, and a server with a rule broken is found out."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import yaml

from tests.cluster import (
    cluster,
    deletions,
    ownership,
    test_replay_exchanges,
    test_replay_lists_watches,
    test_replay_more,
    test_replay_webhook,
)
from tests.cluster.answers import Json, Refused
from tests.cluster.api_server import serving
from tests.cluster.kinds import knative
from tests.cluster.recordings import NAMESPACE, RECORDED, Client, Replay, needs_recordings, recorded

pytestmark = needs_recordings

# How many records a file has, and which of them are not compared, each with why.
COUNTED: Final[dict[str, tuple[int, dict[str, str]]]] = {
    "api_exchanges.json": (79, {}),
    "api_more.json": (48, test_replay_more.NOT_IMITATED),
    "leases.json": (12, {}),
    "finalizers.json": (14, test_replay_more.NOT_IMITATED),
    "list_paging.json": (15, {}),
    "watch_semantics.json": (16, test_replay_lists_watches.NOT_IMITATED),
    "webhook_validation.jsonl": (277, {}),
    "webhook_dry_run_differs.json": (9, {}),
    "webhook_defaults.json": (8, {}),
    "webhook_updates.json": (18, test_replay_webhook.NOT_IMITATED),
    "feature_flags.json": (58, {}),
}
ELSEWHERE: Final[dict[str, str]] = {
    "autoscaler_websocket.json": "the autoscaler's socket is none of the API server's",
    "conditions.json": "what Knative's controllers write",
    "custom_class.json": "what Knative's controllers write",
    "lifecycle": "what Knative's controllers write",
    "lifecycle_tbc0": "what Knative's controllers write",
    "recorder": "how the recordings of life cycles are read",
    "shutdown.json": "how a real server ends",
    "states_failing.json": "what Knative's controllers write",
    "README.md": "the facts in words",
}
# In part only: `test_replay_more.PARTLY`, `test_replay_webhook.FIRST_LINE_ONLY`, and the children in webhook_defaults.


def names_of(file: str) -> list[str]:
    found: Any = recorded(file)
    return [each["name"] for each in (found["exchanges"] if isinstance(found, dict) else found)]


def test_every_recording_is_counted() -> None:
    """A file or a record that is new is either compared or said not to be."""
    assert {each.name for each in RECORDED.iterdir()} == COUNTED.keys() | ELSEWHERE.keys()
    assert {file: len(names_of(file)) for file in COUNTED} == {file: count for file, (count, _) in COUNTED.items()}
    left_out = {name: why for _, table in COUNTED.values() for name, why in table.items()}
    everything = {name for file in COUNTED for name in names_of(file)}
    assert left_out.keys() <= everything, "what is left out is recorded"
    assert len(left_out) == 12


def nothing_is_checked(*_: object) -> list[Any]:
    return []


def broken_generation(_kind: object, obj: Json) -> Json:
    return obj["metadata"]  # type: ignore[no-any-return]


def untold(_: object) -> Refused:
    return Refused(409, {"message": "", "code": 409})


BROKEN: Final[list[Any]] = [
    pytest.param(cluster, "_specified", broken_generation, "apply_change_label_only", id="labels bump the generation"),
    pytest.param(ownership, "check", nothing_is_checked, "apply_unknown_field_strict", id="applied without a type"),
    pytest.param(ownership, "_pruned", lambda _, new, *__: new, "apply_remove_owned_field", id="nothing is removed"),
    pytest.param(ownership, "conflicting", untold, "apply_other_manager_conflict", id="conflicts are not told"),
    pytest.param(deletions, "_check", nothing_is_checked, "delete_precondition_uid_conflict", id="any uid will do"),
    pytest.param(cluster, "accept", lambda *_, **__: None, "create_bad_name", id="any name will do"),
]


@pytest.mark.parametrize(("module", "name", "broken", "found"), BROKEN)
def test_a_broken_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, broken: Callable[..., Any], found: str
) -> None:
    """The control: the exchange that the rule is about differs."""
    monkeypatch.setattr(module, name, broken)
    with serving() as server, server.no_collector(), Client(server) as client:
        server.namespace(NAMESPACE)
        replay = Replay(server, client, test_replay_exchanges.SENT, test_replay_exchanges.BEFORE)
        for each in test_replay_exchanges.EXCHANGES:
            faults = replay.step(each)
            if each["name"] == found:
                break
        assert faults


def test_the_definitions_are_knatives() -> None:
    """What lies in `data` is what lies beside the checkout, less descriptions and columns."""

    def schemas(definition: Json) -> dict[str, Any]:
        return {each["name"]: bare(each["schema"]) for each in definition["spec"]["versions"]}

    theirs = [
        definition
        for path in sorted((RECORDED.parent / "knative-crds").glob("*.yaml"))
        for definition in yaml.safe_load_all(path.read_text())
        if definition
    ]
    named = {each["metadata"]["name"]: schemas(each) for each in theirs}
    assert {each["metadata"]["name"]: schemas(each) for each in knative()} == named


def bare(schema: Any, *, named: bool = False) -> Any:
    """A schema without its descriptions; a property may be called that."""
    if isinstance(schema, dict):
        kept = {key: each for key, each in schema.items() if named or key != "description"}
        return {key: bare(each, named=key == "properties" and not named) for key, each in kept.items()}
    return [bare(each) for each in schema] if isinstance(schema, list) else schema
