"""An Event is told of what has come to be so, and of nothing that is as it was."""

from typing import Any

import pytest

from controlplane.knative.policy.custom_resources import (
    Condition,
    ModelFacts,
    ResourceEvent,
    applied_condition,
    model_ready_condition,
    new_events,
    status,
)

MODEL = {"metadata": {"name": "m", "generation": 1}}
READY = ResourceEvent("Ready", "it takes requests")
FAILED = ResourceEvent("Failed", "its version prod is faulty")
REFUSED = ResourceEvent("Refused", "NotFound: no such version")


def model(*, is_servable: bool | None = None, refused: str = "") -> dict[str, Any]:
    """The status of one; None where it was not pushed."""
    facts = None if is_servable is None else ModelFacts("a", {}, {}, is_servable, 1, 0)
    done = (
        Condition("Applied", is_true=False, reason="NotFound", message=refused) if refused else applied_condition(None)
    )
    return dict(status(MODEL, 1, (done, model_ready_condition(facts)), "now"))


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        pytest.param({}, model(), (), id="not pushed yet"),
        pytest.param(model(), model(is_servable=True), (READY,), id="it is ready"),
        pytest.param(model(is_servable=True), model(is_servable=True), (), id="it still is"),
        pytest.param(model(is_servable=True), model(is_servable=False), (FAILED,), id="it has failed"),
        pytest.param(model(is_servable=False), model(is_servable=True), (READY,), id="it is well again"),
        pytest.param({}, model(refused="no such model"), (), id="there is nothing to do it to yet"),
        pytest.param(
            model(is_servable=True), model(is_servable=True, refused="no such version"), (REFUSED,),
            id="what it says was refused",
        ),
        pytest.param(
            model(is_servable=True, refused="too many"), model(is_servable=True, refused="no such version"), (REFUSED,),
            id="for another reason",
        ),
        pytest.param(
            model(is_servable=False, refused="no such version"), model(is_servable=True, refused="no such version"),
            (READY,), id="it is ready, and is still refused",
        ),
        pytest.param({}, {"state": "ready"}, (READY,), id="a version is ready"),
        pytest.param(
            {"state": "ready"}, {"state": "faulty"}, (ResourceEvent("Failed", "it is faulty"),), id="a version failed"
        ),
        pytest.param({"state": "ready"}, {"state": "ready", "readyReplicas": 1}, (), id="a version has a replica more"),
        pytest.param({"state": "ready"}, {"state": "deleted"}, (), id="a version is deleted"),
    ],
)  # fmt: skip
def test_status_change_emits_each_event_once(
    before: dict[str, Any], after: dict[str, Any], want: tuple[ResourceEvent, ...]
) -> None:
    """Each once."""
    assert new_events(before, after) == want


def test_all_but_ready_events_are_warnings() -> None:
    """All but that it is ready."""
    assert [each.is_warning for each in (READY, FAILED, REFUSED)] == [False, True, True]
