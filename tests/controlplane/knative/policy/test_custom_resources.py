"""Custom resources: specs are parsed strictly, compared with the present state, and shown as conditions with stable
times.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from controlplane.knative.policy import custom_resources
from controlplane.knative.policy.custom_resources import Condition, ModelFacts, TenantFacts, model_drift, tenant_drift
from controlplane.scaling.policy.scale_settings import ScaleChange
from kelvin.contracts.errors import Conflict, NotFound, Refused
from kelvin.contracts.serving.control_messages import TenantLimits

CRDS = Path(__file__).parents[4] / "manifests" / "crds"
A, B = "a" * 64, "b" * 64
FACTS = ModelFacts(
    prod=A,
    split={},
    scale={"min": 0, "max": 3, "target": None, "window_s": 60.0, "grace_s": 30.0},
    is_servable=True,
    versions=2,
    replicas=1,
)


def model(**spec: Any) -> dict[str, Any]:
    """Return a Model object."""
    return {
        "apiVersion": custom_resources.API_VERSION,
        "kind": "Model",
        "metadata": {"name": "chat", "namespace": "kelvin-acme", "generation": 3},
        "spec": {"tenant": "acme", **spec},
    }


@pytest.mark.parametrize(
    ("spec", "facts", "want"),
    [
        pytest.param({}, FACTS, (), id="an empty spec"),
        pytest.param({"prod": A[:12], "scale": {"max": 3}}, FACTS, (), id="equal fields"),
        pytest.param({"prod": B[:12]}, FACTS, ("prod",), id="another version"),
        pytest.param({"scale": {"min": 1, "max": 3}}, FACTS, ("scale.min",), id="one field of two"),
        pytest.param({"scale": {"windowSeconds": 30}}, FACTS, ("scale.windowSeconds",), id="a unit in its name"),
        pytest.param({"split": {A[:12]: 9, B[:12]: 1}}, FACTS, ("split",), id="a split that does not exist"),
        pytest.param({"split": {A[:12]: 9, B: 1}}, replace(FACTS, split={A: 9, B: 1}), (), id="a split that exists"),
        pytest.param({"split": {A: 1, B: 1}}, replace(FACTS, split={A: 9, B: 1}), ("split",), id="other weights"),
        pytest.param({}, replace(FACTS, split={A: 9, B: 1}), (), id="a split that the spec does not set"),
    ],
)
def test_model_drift_lists_differing_fields(spec: dict[str, Any], facts: ModelFacts, want: tuple[str, ...]) -> None:
    """Only fields that the spec sets are compared."""
    assert model_drift(custom_resources.model_spec(model(**spec)), facts) == want


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        pytest.param({}, (), id="an empty spec"),
        pytest.param({"suspended": False, "limits": {"rpm": 60}}, (), id="equal fields"),
        pytest.param({"suspended": True}, ("suspended",), id="not suspended yet"),
        pytest.param(
            {"limits": {"rpm": 61, "deadlineMaxSeconds": 5}},
            ("limits.rpm", "limits.deadlineMaxSeconds"),
            id="two limits",
        ),
    ],
)
def test_tenant_drift_lists_differing_fields(spec: dict[str, Any], want: tuple[str, ...]) -> None:
    """Only fields that the spec sets are compared."""
    obj = {**model(), "spec": spec}
    assert (
        tenant_drift(custom_resources.tenant_spec(obj), TenantFacts(suspended=False, limits={"rpm": 60}, models=0))
        == want
    )


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"prod": "A" * 12}, id="a digest in capitals"),
        pytest.param({"prod": "a" * 11}, id="a digest that is too short"),
        pytest.param({"scale": {"idle": "warm"}}, id="a setting of one machine"),
        pytest.param({"deletionPolicy": "Maybe"}, id="an unknown policy"),
        pytest.param({"tenant": 5}, id="a tenant that is a number"),
        pytest.param({"split": {A[:12]: 0, B[:12]: 1}}, id="a weight of zero"),
        pytest.param({"split": {A[:12]: 1001, B[:12]: 1}}, id="a weight above the limit"),
    ],
)
def test_invalid_spec_is_refused(spec: dict[str, Any]) -> None:
    """The error names the object."""
    with pytest.raises(Refused, match="chat"):
        custom_resources.model_spec(model(**spec))


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("min", "min"),
        ("window_s", "windowSeconds"),
        ("store_bytes", "storeBytes"),
        ("deadline_max_s", "deadlineMaxSeconds"),
    ],
)
def test_field_names_become_camel_case(name: str, want: str) -> None:
    """Units are written out."""
    assert custom_resources.to_camel_case(name) == want


def test_unchanged_condition_keeps_its_transition_time() -> None:
    """So an unchanged status writes no object."""
    good, bad = (
        custom_resources.applied_condition(None),
        custom_resources.applied_condition(Conflict("version", "is faulty")),
    )
    first = custom_resources.build_status(model(), 3, (good,), "2026-01-01T00:00:00Z", versions=2)
    again = custom_resources.build_status({**model(), "status": first}, 3, (good,), "2026-01-02T00:00:00Z", versions=2)
    assert again == first
    turned = custom_resources.build_status({**model(), "status": first}, 3, (bad,), "2026-01-02T00:00:00Z")
    condition: dict[str, Any] = cast(list[Any], turned["conditions"])[0]
    assert condition["lastTransitionTime"] == "2026-01-02T00:00:00Z"
    assert (condition["status"], condition["reason"]) == ("False", "Conflict")
    assert condition["message"] == "version: is faulty"
    assert condition["observedGeneration"] == 3


@pytest.mark.parametrize(
    ("found", "want"),
    [
        pytest.param(custom_resources.model_ready_condition(None), ("Ready", False, "NotPushed"), id="never pushed"),
        pytest.param(
            custom_resources.model_ready_condition(replace(FACTS, is_servable=False)),
            ("Ready", False, "Faulty"),
            id="faulty",
        ),
        pytest.param(
            custom_resources.model_ready_condition(replace(FACTS, replicas=0)),
            ("Ready", True, "Servable"),
            id="at zero",
        ),
        pytest.param(custom_resources.tenant_ready_condition(None), ("Ready", False, "NotMade"), id="no tenant"),
        pytest.param(
            custom_resources.tenant_ready_condition(TenantFacts(suspended=True, limits={}, models=1)),
            ("Ready", False, "Suspended"),
            id="suspended",
        ),
        pytest.param(
            custom_resources.tenant_ready_condition(TenantFacts(suspended=False, limits={}, models=1)),
            ("Ready", True, "Active"),
            id="active",
        ),
        pytest.param(
            custom_resources.in_sync_condition(("prod",)),
            ("InSync", False, "ChangedElsewhere"),
            id="drifted",
        ),
        pytest.param(
            custom_resources.applied_condition(NotFound("model", "chat")), ("Applied", False, "NotFound"), id="refused"
        ),
    ],
)
def test_conditions(found: Condition, want: tuple[str, bool, str]) -> None:
    """The reason is one word, as in Kubernetes."""
    assert (found.type, found.is_true, found.reason) == want


def test_only_the_finalizer_is_applied() -> None:
    """The patch has no fields of other managers."""
    assert custom_resources.finalizer_patch(model(), finalizer=True) == {
        "apiVersion": custom_resources.API_VERSION,
        "kind": "Model",
        "metadata": {"name": "chat", "namespace": "kelvin-acme", "finalizers": ["kelvin.dev/deletion"]},
    }
    assert "finalizers" not in custom_resources.finalizer_patch(model(), finalizer=False)["metadata"]


def schema(name: str) -> dict[str, Any]:
    """Return the properties of a kind's spec from its CRD."""
    crd = yaml.safe_load((CRDS / f"{name}.yaml").read_text())
    return dict(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])


def names(kind: type) -> set[str]:
    """Return the encoded field names of a struct."""
    return set(kind.__struct_encode_fields__)  # type: ignore[attr-defined]


def test_schema_has_the_declared_fields() -> None:
    """The cluster silently drops a field that the schema lacks."""
    assert set(schema("models")) == names(custom_resources.ModelSpec)
    assert set(schema("models")["scale"]["properties"]) == names(custom_resources.Scale)
    assert set(schema("tenants")) == names(custom_resources.TenantSpec)
    assert set(schema("tenants")["limits"]["properties"]) == names(custom_resources.Limits)


def test_stores_have_the_declared_fields() -> None:
    """Every limit of a tenant can be declared, and every scale setting that a cluster supports."""
    assert set(custom_resources.Limits.__struct_fields__) == set(TenantLimits.__struct_fields__)
    assert set(ScaleChange.__struct_fields__) - set(custom_resources.Scale.__struct_fields__) == {"idle", "wait_price"}
