"""Events of custom resources: one for each change of state, none for a state that stays."""

from typing import Any

import pytest

from controlplane.knative.policy.custom_resources import (
    Condition,
    ModelFacts,
    ResourceEvent,
    applied_condition,
    build_status,
    model_ready_condition,
    new_events,
)

MODEL = {"metadata": {"name": "m", "generation": 1}}
READY = ResourceEvent("Ready", "it takes requests")
FAILED = ResourceEvent("Failed", "its version prod is faulty")
REFUSED = ResourceEvent("Refused", "NotFound: no such version")


def model(*, is_servable: bool | None = None, refused: str = "") -> dict[str, Any]:
    """Return the status of a Model. `is_servable` is None for a model that was not pushed."""
    facts = None if is_servable is None else ModelFacts("a", {}, {}, is_servable, 1, 0)
    done = (
        Condition("Applied", is_true=False, reason="NotFound", message=refused) if refused else applied_condition(None)
    )
    return dict(build_status(MODEL, 1, (done, model_ready_condition(facts)), "now"))


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        pytest.param({}, model(), (), id="not pushed yet"),
        pytest.param(model(), model(is_servable=True), (READY,), id="a model becomes ready"),
        pytest.param(model(is_servable=True), model(is_servable=True), (), id="a model stays ready"),
        pytest.param(model(is_servable=True), model(is_servable=False), (FAILED,), id="a model fails"),
        pytest.param(model(is_servable=False), model(is_servable=True), (READY,), id="a model recovers"),
        pytest.param({}, model(refused="no such model"), (), id="a refusal before the push"),
        pytest.param(
            model(is_servable=True), model(is_servable=True, refused="no such version"), (REFUSED,),
            id="the spec is refused",
        ),
        pytest.param(
            model(is_servable=True, refused="too many"), model(is_servable=True, refused="no such version"), (REFUSED,),
            id="the spec is refused for another reason",
        ),
        pytest.param(
            model(is_servable=False, refused="no such version"), model(is_servable=True, refused="no such version"),
            (READY,), id="a refused model becomes ready",
        ),
        pytest.param({}, {"state": "ready"}, (READY,), id="a version becomes ready"),
        pytest.param(
            {"state": "ready"}, {"state": "faulty"}, (ResourceEvent("Failed", "it is faulty"),), id="a version fails"
        ),
        pytest.param({"state": "ready"}, {"state": "ready", "readyReplicas": 1}, (), id="a version gets a replica"),
        pytest.param({"state": "ready"}, {"state": "deleted"}, (), id="a version is deleted"),
    ],
)  # fmt: skip
def test_status_change_emits_each_event_once(
    before: dict[str, Any], after: dict[str, Any], want: tuple[ResourceEvent, ...]
) -> None:
    assert new_events(before, after) == want


def test_all_but_ready_events_are_warnings() -> None:
    assert [each.is_warning for each in (READY, FAILED, REFUSED)] == [False, True, True]
