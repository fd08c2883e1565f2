"""The next step for an object: it is applied when something may have changed, and no more often than needed."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from controlplane.knative.policy.apply_steps import (
    CHECK_S,
    DIFFERS,
    MAX_DIFFERENCES,
    REPAIR_RESET_S,
    Apply,
    ApplyState,
    ApplyStep,
    Check,
    DeleteObject,
    Foreign,
    Refusal,
    Settled,
    Wait,
    after_refusal,
    after_success,
    decide,
    delay_until,
    digest_of,
    owned_part,
    with_digest,
)
from controlplane.knative.policy.object_labels import APPLIED, INSTALLATION

NO = Refusal("Invalid", "no")
HERE, THERE = "kelvin", "kelvin-staging"  # installations


def made(by: str = HERE, **spec: Any) -> dict[str, Any]:
    about = {"name": "m", "labels": {"app.kubernetes.io/managed-by": "kelvin"}}
    return with_digest({"apiVersion": "v1", "kind": "Thing", "metadata": about, "spec": spec}, by)


def found(obj: dict[str, Any], **about: Any) -> dict[str, Any]:
    obj = deepcopy(obj)
    obj["metadata"] |= {"uid": "u1", "resourceVersion": "7", "generation": 3, **about}
    return obj


def noted(obj: dict[str, Any], **notes: str) -> dict[str, Any]:
    """Return the object as found, with these annotations added or replaced."""
    return found(obj, annotations=obj["metadata"]["annotations"] | notes)


WANTED = made(image="one")
STAMP = digest_of(WANTED)
TAKEN = ApplyState(STAMP, 1, 5.0, 5.0, ("u1", 3))  # applied at second 5
UNSIGNED = deepcopy(WANTED)  # by a build that wrote no installation
del UNSIGNED["metadata"]["annotations"][INSTALLATION]


@pytest.mark.parametrize(
    ("wanted", "seen", "memory", "want"),
    [
        pytest.param(None, None, ApplyState(), Settled(), id="nothing is wanted and nothing is there"),
        pytest.param(WANTED, None, ApplyState(), Apply(), id="a missing object is written"),
        pytest.param(WANTED, found(made(image="two")), ApplyState(), Apply(), id="a different object is written"),
        pytest.param(None, found(WANTED), ApplyState(), DeleteObject("u1"), id="an unwanted object is deleted by uid"),
        pytest.param(None, found(WANTED, labels={}), ApplyState(), Settled(), id="an object without our label is kept"),
        pytest.param(None, found(WANTED, labels=None), ApplyState(), Settled(), id="an object without labels is kept"),
        pytest.param(None, found(WANTED, annotations={}), ApplyState(), Settled(), id="an object without digest"),
        pytest.param(None, found(WANTED, annotations=None), ApplyState(), Settled(), id="no annotations: kept"),
        pytest.param(None, found(made(by=THERE)), ApplyState(), Settled(), id="another installation's object is kept"),
        pytest.param(
            WANTED,
            found(made(by=THERE, image="one")),
            ApplyState(),
            Foreign(THERE),
            id="another installation's object is not overwritten",
        ),
        pytest.param(WANTED, found(UNSIGNED), ApplyState(), Apply(), id="an object without an installation is signed"),
        pytest.param(None, found(UNSIGNED), ApplyState(), DeleteObject("u1"), id="is deleted"),
        pytest.param(
            None, found(WANTED, deletionTimestamp="t"), ApplyState(), Settled(), id="a terminating one is left"
        ),
        pytest.param(
            WANTED,
            found(made(image="two"), deletionTimestamp="t"),
            ApplyState(),
            Settled(),
            id="a terminating object is not written",
        ),
        pytest.param(WANTED, None, ApplyState(STAMP, 1, 12.0, 10.0, None, NO), Wait(12.0), id="a refused object waits"),
        pytest.param(WANTED, None, ApplyState(STAMP, 1, 10.0, 9.0, None, NO), Apply(), id="then retried"),
        pytest.param(
            WANTED, None, ApplyState("x", 1, 12.0, 10.0, None, NO), Apply(), id="a changed object is tried at once"
        ),
        pytest.param(
            None, found(WANTED), ApplyState("", 1, 12.0, 10.0, None, NO), Wait(12.0), id="a deletion waits, too"
        ),
        pytest.param(WANTED, found(WANTED), ApplyState(), Check(), id="an earlier leader's object is checked"),
        pytest.param(WANTED, found(WANTED), TAKEN, Settled(5.0 + CHECK_S), id="our own write is left alone"),
        pytest.param(
            WANTED, found(WANTED, resourceVersion="8"), TAKEN, Settled(5.0 + CHECK_S), id="a status change is none"
        ),
        pytest.param(WANTED, found(WANTED), replace(TAKEN, tried_at=9.0 - CHECK_S), Check(), id="checked later"),
        pytest.param(WANTED, found(WANTED, generation=4), TAKEN, Apply(), id="an edited object is written"),
        pytest.param(
            WANTED,
            found(WANTED, generation=4),
            replace(TAKEN, not_before=12.0),
            Wait(12.0),
            id="a repeated edit waits",
        ),
        pytest.param(WANTED, found(WANTED, uid="u2"), TAKEN, Apply(), id="a recreated object is written"),
        pytest.param(WANTED, found(WANTED, labels={}), TAKEN, Apply(), id="a removed label is restored"),
        pytest.param(WANTED, noted(WANTED, **{APPLIED: "x"}), TAKEN, Apply(), id="a changed digest is restored"),
        pytest.param(WANTED, noted(WANTED, theirs="1"), TAKEN, Settled(5.0 + CHECK_S), id="annotations of others stay"),
        pytest.param(
            WANTED,
            found(WANTED),
            ApplyState(STAMP, 1, 10.0, 9.0, None, NO),
            Apply(),
            id="a refused change is retried",
        ),
        pytest.param(found(WANTED), found(WANTED), ApplyState(), Settled(), id="an object as it was seen"),
    ],
)
def test_decide_returns_the_next_step(
    wanted: dict[str, Any] | None, seen: dict[str, Any] | None, memory: ApplyState, want: ApplyStep
) -> None:
    """The time is second 10."""
    assert decide(wanted, seen, memory, now=10.0, installation=HERE) == want


def test_removed_field_changes_the_digest() -> None:
    """Only the digest tells a removed field from one that a webhook set. An object with a digest keeps it."""
    before, after = made(image="one", scale=3), made(image="one")
    assert digest_of(before) != digest_of(after)
    assert decide(after, found(before), TAKEN, now=10.0, installation=HERE) == Apply()
    assert with_digest(after, HERE) == after


SPEC: dict[str, Any] = {"image": "one", "args": [{"a": 1}], "theirs": {"b": 2}}
OWNED = {"f:metadata": {"f:labels": {"f:app.kubernetes.io/managed-by": {}}}, "f:spec": {"f:image": {}, "f:args": {}}}
OURS = {"manager": "kelvin", "operation": "Apply", "fieldsV1": OWNED}
THEIRS = OURS | {"manager": "kubectl"}
MINE: dict[str, Any] = {
    "metadata": {"labels": {"app.kubernetes.io/managed-by": "kelvin"}},
    "spec": {"image": "one", "args": [{"a": 1}]},
}


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        pytest.param([OURS], MINE, id="ours, with lists whole"),
        pytest.param([THEIRS, OURS], MINE, id="ours after another manager's"),
        pytest.param([OURS | {"fieldsV1": OWNED | {"f:spec": {}}}], MINE | {"spec": SPEC}, id="ours as a whole"),
        pytest.param([THEIRS], {}, id="another manager's"),
        pytest.param([OURS | {"operation": "Update"}], {}, id="an update"),
        pytest.param([OURS | {"subresource": "status"}], {}, id="ours of the status"),
        pytest.param(None, {}, id="unknown"),
    ],
)
def test_owned_part_keeps_only_our_fields(entries: list[dict[str, Any]] | None, part: dict[str, Any]) -> None:
    """Fields of other managers and the status are left out. Kind and name stay."""
    seen = found(made(**SPEC), namespace="n", managedFields=entries) | {"status": {"ready": True}}
    about = {**part.get("metadata", {}), "name": "m", "namespace": "n"}
    assert owned_part(seen) == {"apiVersion": "v1", "kind": "Thing", **part, "metadata": about}


def test_refusals_back_off_exponentially() -> None:
    """The pause doubles up to five minutes. A new wanted state starts again."""
    memory, pauses = ApplyState(), []
    for _ in range(11):
        memory = after_refusal(WANTED, NO, memory, now=100.0, luck=0.0)
        pauses.append(memory.not_before - 100.0)
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert memory.refusal == NO
    other = after_refusal(made(image="two"), NO, memory, now=100.0, luck=0.0)
    assert (other.tries, other.not_before) == (1, 101.0)
    assert delay_until(other, 130.0).not_before == 130.0
    assert delay_until(other, 100.5).not_before == 101.0


def test_success_resets_the_backoff() -> None:
    """The next repair is immediate."""
    memory = ApplyState()
    for _ in range(8):
        memory = after_refusal(WANTED, NO, memory, now=100.0, luck=0.0)
    memory = after_success(WANTED, found(WANTED), memory, now=400.0, luck=0.0)
    assert (memory.refusal, memory.not_before) == (None, 400.0)


def test_repeated_edits_are_repaired_with_backoff() -> None:
    """Two writers must not race at full speed. After a calm time the repair is immediate again."""
    memory, now, pauses = ApplyState(), 1000.0, []
    for _ in range(5):
        memory = after_success(WANTED, found(WANTED), memory, now, luck=0.0)
        pauses.append(memory.not_before - now)
        now = memory.not_before
    assert pauses == [0, 1, 2, 4, 8]
    memory = after_success(WANTED, found(WANTED), memory, now + REPAIR_RESET_S, luck=0.0)
    assert memory.not_before == now + REPAIR_RESET_S


def test_fields_changed_by_the_cluster_are_reported() -> None:
    """The cluster accepted the object and changed it. The status reports it, and it is not written again."""
    pinned = found(WANTED) | {"spec": {"image": "two", "filled": "in"}}
    memory = after_success(WANTED, pinned, ApplyState(), now=1.0, luck=0.0)
    assert memory.refusal == Refusal(DIFFERS, 'spec.image is "two", not "one"')
    assert not memory.is_failing
    assert decide(WANTED, pinned, memory, now=1.0, installation=HERE) == Settled(1.0 + CHECK_S)


def test_metadata_changed_by_a_webhook_is_not_rewritten() -> None:
    """A webhook's annotation in place of ours is reported once. A later edit of it is repaired."""
    pinned = noted(WANTED, **{APPLIED: "x"})
    memory = after_success(WANTED, pinned, ApplyState(), now=1.0, luck=0.0)
    assert memory.refusal is not None
    assert memory.refusal.reason == DIFFERS
    assert decide(WANTED, pinned, memory, now=2.0, installation=HERE) == Settled(1.0 + CHECK_S)
    assert decide(WANTED, noted(WANTED, **{APPLIED: "y"}), memory, now=2.0, installation=HERE) == Apply()


@pytest.mark.parametrize(
    ("wanted", "answer", "message"),
    [
        pytest.param({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}, "d": 3}, "", id="extra fields do not count"),
        pytest.param({"l": [{"a": 1}]}, {"l": [{"a": 1, "b": 2}]}, "", id="extra fields in list items do not count"),
        pytest.param({"l": [1]}, {"l": [1, 2]}, "spec.l is [1, 2], not [1]", id="a longer list"),
        pytest.param({"l": [1, 2]}, {"l": [2, 1]}, "spec.l[0] is 2, not 1; spec.l[1] is 1, not 2", id="another order"),
        pytest.param({"a": False}, {}, "spec.a is missing, not false", id="a missing field"),
    ],
)
def test_only_applied_fields_are_compared(wanted: dict[str, Any], answer: dict[str, Any], message: str) -> None:
    """The applied spec is compared with the cluster's response."""
    memory = after_success(made(**wanted), found(made(**wanted)) | {"spec": answer}, ApplyState(), now=1.0, luck=0.0)
    assert (memory.refusal.message if memory.refusal else "") == message


def test_reported_differences_are_short() -> None:
    wanted = made(l=["x" * 200] * 99)
    memory = after_success(wanted, found(wanted) | {"spec": {"l": ["y" * 200] * 99}}, ApplyState(), now=1.0, luck=0.0)
    assert memory.refusal is not None
    lines = memory.refusal.message.split("; ")
    assert len(lines) == MAX_DIFFERENCES
    assert all(len(each) < 250 for each in lines)
