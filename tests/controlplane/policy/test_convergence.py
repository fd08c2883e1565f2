"""What is done to an object: nothing where only what others fill in is otherwise, and no more than is of use."""

from copy import deepcopy
from decimal import Decimal
from typing import Any

import pytest

from controlplane.policy.convergence import (
    CALM_S,
    FIRST_S,
    LONGEST_S,
    SHOWN,
    Apply,
    Delete,
    Difference,
    Foreign,
    Memory,
    Refusal,
    Settled,
    Step,
    Wait,
    differences,
    judge,
    not_sooner,
    pause_s,
    quantity,
    refused,
    stamp_of,
    stamped,
    succeeded,
)
from controlplane.policy.labels import INSTALLATION

NO = Refusal("Invalid", "no")
HERE, THERE = "kelvin", "kelvin-staging"  # installations


def made(by: str = HERE, **spec: Any) -> dict[str, Any]:
    about = {"name": "m", "labels": {"app.kubernetes.io/managed-by": "kelvin"}}
    return stamped({"apiVersion": "v1", "kind": "Thing", "metadata": about, "spec": spec}, by)


def found(obj: dict[str, Any], **about: Any) -> dict[str, Any]:
    obj = deepcopy(obj)
    obj["metadata"] |= {"uid": "u1", "resourceVersion": "7", **about}
    return obj


WANTED = made(image="one")
STAMP = stamp_of(WANTED)
UNSIGNED = deepcopy(WANTED)  # by a build that did not say whose it is
del UNSIGNED["metadata"]["annotations"][INSTALLATION]


@pytest.mark.parametrize(
    ("wanted", "seen", "memory", "want"),
    [
        pytest.param(None, None, Memory(), Settled(), id="nothing is wanted and nothing is there"),
        pytest.param(WANTED, None, Memory(), Apply(), id="what is missing is written"),
        pytest.param(WANTED, found(WANTED), Memory(), Settled(), id="what is as it should be is left alone"),
        pytest.param(WANTED, found(made(image="two")), Memory(), Apply(), id="what is otherwise is written"),
        pytest.param(None, found(WANTED), Memory(), Delete("u1"), id="what is not wanted is deleted, that very one"),
        pytest.param(None, found(WANTED, labels={}), Memory(), Settled(), id="what is not ours is never deleted"),
        pytest.param(None, found(WANTED, labels=None), Memory(), Settled(), id="nor what has no labels at all"),
        pytest.param(None, found(WANTED, annotations={}), Memory(), Settled(), id="nor what was not written here"),
        pytest.param(None, found(WANTED, annotations=None), Memory(), Settled(), id="nor what has no notes"),
        pytest.param(None, found(made(by=THERE)), Memory(), Settled(), id="nor what another installation wrote"),
        pytest.param(
            WANTED, found(made(by=THERE, image="one")), Memory(), Foreign(THERE), id="which is not written over either"
        ),
        pytest.param(WANTED, found(UNSIGNED), Memory(), Apply(), id="what was written before anybody signed is signed"),
        pytest.param(None, found(UNSIGNED), Memory(), Delete("u1"), id="and is deleted"),
        pytest.param(
            None, found(WANTED, deletionTimestamp="t"), Memory(), Settled(), id="what is going is not deleted again"
        ),
        pytest.param(
            WANTED, found(made(image="two"), deletionTimestamp="t"), Memory(), Settled(), id="nor written until it went"
        ),
        pytest.param(WANTED, None, Memory(STAMP, 1, 12.0, 10.0, (), NO), Wait(12.0), id="what was refused waits"),
        pytest.param(WANTED, None, Memory(STAMP, 1, 10.0, 9.0, (), NO), Apply(), id="until it is time"),
        pytest.param(WANTED, None, Memory("x", 1, 12.0, 10.0, (), NO), Apply(), id="something else is tried at once"),
        pytest.param(None, found(WANTED), Memory("", 1, 12.0, 10.0, (), NO), Wait(12.0), id="a deletion waits, too"),
        pytest.param(
            WANTED,
            found(made(image="two")),
            Memory(STAMP, 1, 0.0, 0.0, differences(WANTED, made(image="two"))),
            Settled(),
            id="what the cluster makes of it each time is not written again",
        ),
        pytest.param(
            WANTED,
            found(made(image="three")),
            Memory(STAMP, 1, 0.0, 0.0, differences(WANTED, made(image="two"))),
            Apply(),
            id="but something else that somebody makes of it is",
        ),
    ],
)
def test_judge(wanted: dict[str, Any] | None, seen: dict[str, Any] | None, memory: Memory, want: Step) -> None:
    """One object, at second 10."""
    assert judge(wanted, seen, memory, now=10.0, installation=HERE) == want


@pytest.mark.parametrize(
    ("wanted", "seen", "fields"),
    [
        pytest.param({"a": 1}, {"a": 1, "b": 2}, [], id="what others filled in"),
        pytest.param({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, [], id="and within"),
        pytest.param({"l": [{"a": 1}]}, {"l": [{"a": 1, "b": 2}]}, [], id="and in what a list holds"),
        pytest.param({"l": [1]}, {"l": [1, 2]}, ["spec.l"], id="a longer list"),
        pytest.param({"l": [1, 2]}, {"l": [2, 1]}, ["spec.l[0]", "spec.l[1]"], id="another order"),
        pytest.param({"a": {}, "b": [], "c": None}, {}, [], id="what is empty may be left out"),
        pytest.param({"a": {"b": 1}}, {}, ["spec.a"], id="what is missing"),
        pytest.param({"a": False}, {}, ["spec.a"], id="no is not left out"),
        pytest.param(
            {"limits": {"memory": "8192Mi", "x": 1}}, {"limits": {"memory": "8Gi", "x": "1"}}, [], id="amounts"
        ),
        pytest.param({"limits": {"memory": "1076887552"}}, {"limits": {"memory": "1027Mi"}}, [], id="bytes"),
        pytest.param(
            {"limits": {"memory": "8Gi"}}, {"limits": {"memory": "8G"}}, ["spec.limits.memory"], id="other ones"
        ),
        pytest.param({"name": "1000m"}, {"name": "1"}, ["spec.name"], id="names are no amounts"),
    ],
)
def test_differences(wanted: dict[str, Any], seen: dict[str, Any], fields: list[str]) -> None:
    """Of the spec."""
    of = {"apiVersion": "v1", "kind": "Thing", "metadata": {"name": "m"}}
    assert [each.field for each in differences({**of, "spec": wanted}, {**of, "spec": seen})] == fields


def test_values_of_secrets_are_not_said() -> None:
    """Differences are read by people, and go to logs."""
    one, other = ({"kind": "Secret", "metadata": {}, "data": {"key": value}} for value in ("aaa", "bbb"))
    (said,) = differences(one, other)
    assert said.field == "data.key"
    assert "aaa" not in str(said)
    assert "bbb" not in str(said)


def test_differences_are_few() -> None:
    """Whatever somebody made of it; and none of them is long."""
    found_them = differences(made(l=["x" * 200] * 99), made(l=["y" * 200] * 99))
    assert len(found_them) == SHOWN
    assert all(len(str(each)) < 250 for each in found_them)


OWNED = {
    "f:metadata": {"f:labels": {"f:app.kubernetes.io/managed-by": {}}, "f:annotations": {}},
    "f:spec": {"f:image": {}},
}


@pytest.mark.parametrize(
    ("entries", "want"),
    [
        pytest.param(None, Settled(), id="unknown"),
        pytest.param([{"manager": "kelvin", "operation": "Apply", "fieldsV1": OWNED}], Settled(), id="ours"),
        pytest.param(
            [{"manager": "kelvin", "operation": "Apply", "fieldsV1": OWNED | {"f:spec": {}}}],
            Settled(),
            id="as a whole",
        ),
        pytest.param(
            [{"manager": "kelvin", "operation": "Apply", "fieldsV1": OWNED | {"f:spec": {"f:x": {}}}}],
            Apply(),
            id="another took one",
        ),
        pytest.param([{"manager": "kubectl", "operation": "Apply", "fieldsV1": OWNED}], Apply(), id="another's"),
        pytest.param(
            [{"manager": "kelvin", "operation": "Apply", "subresource": "status", "fieldsV1": OWNED}],
            Apply(),
            id="ours of the status",
        ),
    ],
)
def test_fields_that_somebody_took(entries: list[dict[str, Any]] | None, want: Step) -> None:
    """Values are as wanted; who else wrote there may have written more."""
    assert judge(WANTED, found(WANTED, managedFields=entries), Memory(), now=0.0, installation=HERE) == want


def test_a_field_that_is_no_longer_wanted_is_a_difference() -> None:
    """Nothing else tells it from one that a webhook filled in."""
    before, after = made(image="one", scale=3), made(image="one")
    assert [each.field for each in differences(after, before)] == ["metadata.annotations.kelvin.dev/applied"]
    assert stamped(after, HERE) == after
    assert stamp_of(before) != stamp_of(after)


def test_refusals_are_tried_again_more_and_more_rarely() -> None:
    """Twice as long each time, up to five minutes; something else is a new beginning."""
    memory, pauses = Memory(), []
    for _ in range(11):
        memory = refused(WANTED, NO, memory, now=100.0, luck=0.0)
        pauses.append(memory.not_before - 100.0)
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert memory.refusal == NO
    other = refused(made(image="two"), NO, memory, now=100.0, luck=0.0)
    assert (other.tries, other.not_before) == (1, 101.0)
    assert not_sooner(other, 130.0).not_before == 130.0
    assert not_sooner(other, 100.5).not_before == 101.0


def test_success_forgets_refusals() -> None:
    """The next repair is at once."""
    memory = Memory()
    for _ in range(8):
        memory = refused(WANTED, NO, memory, now=100.0, luck=0.0)
    memory = succeeded(WANTED, found(WANTED), memory, now=400.0, luck=0.0)
    assert (memory.refusal, memory.not_before) == (None, 400.0)


def test_who_edits_it_again_and_again_is_repaired_more_and_more_rarely() -> None:
    """Not as quickly as both can write; after a calm time at once again."""
    memory, now, pauses = Memory(), 1000.0, []
    for _ in range(5):
        memory = succeeded(WANTED, found(WANTED), memory, now, luck=0.0)
        pauses.append(memory.not_before - now)
        now = memory.not_before
    assert pauses == [0, 1, 2, 4, 8]
    memory = succeeded(WANTED, found(WANTED), memory, now + CALM_S, luck=0.0)
    assert memory.not_before == now + CALM_S


def test_what_a_cluster_makes_of_it_is_told() -> None:
    """It was taken, and is another: a status says so."""
    memory = succeeded(WANTED, found(made(image="two")), Memory(), now=1.0, luck=0.0)
    assert Difference("spec.image", '"one"', '"two"') in memory.kept
    assert memory.refusal is not None
    assert 'spec.image is "two", not "one"' in memory.refusal.message
    assert not memory.failing
    assert judge(WANTED, found(made(image="two")), memory, now=1.0, installation=HERE) == Settled()


def test_pauses_are_bounded() -> None:
    """However often, and by luck at least a half."""
    assert pause_s(1, 0.0) == FIRST_S
    assert pause_s(10**6, 0.0) == LONGEST_S
    assert pause_s(10**6, 0.999) > LONGEST_S / 2


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("1000m", 1), ("8Gi", 8 * 2**30), ("1e3", 1000), ("1.5k", 1500), ("-2", -2), (".5", Decimal("0.5"))],
)
def test_quantities(text: str, value: Decimal) -> None:
    """As Kubernetes spells them."""
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "8 Gi", "8GiB", "one", True, None, [], "1e1000"])
def test_no_quantities(text: Any) -> None:
    """Anything else."""
    assert quantity(text) is None
