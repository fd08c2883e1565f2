"""Parse the specs of Model and Tenant objects, and compute their statuses. Pure.

A spec is applied once per generation. So the admin API and the objects write one state, and the last writer wins. If a
field was changed through the admin API since, the object's condition `InSync` says so.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.errors import Failure, InvalidRequest, Refused
from kelvin.contracts.patches import Patch, patch_of
from kelvin.contracts.serving.control_messages import TenantLimits
from kelvin.contracts.wire import convert

Json = dict[str, Any]

GROUP: Final = "kelvin.dev"
API_VERSION: Final = f"{GROUP}/v1alpha1"
MODEL, MODEL_VERSION, TENANT = "Model", "ModelVersion", "Tenant"
FINALIZER: Final = f"{GROUP}/deletion"

READY, FAILED, REFUSED = "Ready", "Failed", "Refused"  # reasons of Events
_EVENT_STATES: Final = {"ready": (READY, "it takes requests"), "faulty": (FAILED, "it is faulty")}  # of a ModelVersion

_MAX_RULE: Final = 400
_UNIT_NAMES: Final = {"_s": "Seconds"}  # suffixes of names, and the words that Kubernetes uses for them

DeletionPolicy = Literal["Retain", "Delete"]
Weight = Annotated[int, Meta(ge=1, le=1000)]  # as the admin API takes them
Prefix = Annotated[str, Meta(pattern="^[0-9a-f]{12,64}$")]


def to_camel_case(name: str) -> str:
    """Convert a name to camel case with a spelled-out unit: `window_s` becomes `windowSeconds`."""
    for end, unit in _UNIT_NAMES.items():
        if name.endswith(end):
            return to_camel_case(name[: -len(end)]) + unit
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


class _Spec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename=to_camel_case
):
    """Base of specs. A field that is left out is not managed by the object."""


if TYPE_CHECKING:
    Scale = Patch
    Limits = Patch
else:
    # Bounds are checked when a generation is applied, so an object outside of them still gets a status and can be
    # deleted. A cluster has no sleeping replicas, so `idle` and `wait_price` have no effect there.
    _SPEC = {"bounded": False, "rename": to_camel_case}
    Scale = patch_of(ScaleSettings, "Scale", "How the model scales.", without=("idle", "wait_price"), **_SPEC)
    Limits = patch_of(TenantLimits, "Limits", "The tenant's own limits.", **_SPEC)


class ModelSpec(_Spec, frozen=True):
    """Spec of a model that is pushed, or will be. `prod` and the keys of `split` are versions, or prefixes of them."""

    tenant: str
    prod: Prefix | None = None
    split: dict[Prefix, Weight] = {}
    scale: Scale = Scale()
    deletion_policy: DeletionPolicy = "Retain"


class TenantSpec(_Spec, frozen=True):
    """Spec of a tenant, which is created if it does not exist."""

    suspended: bool | None = None
    limits: Limits = Limits()
    deletion_policy: DeletionPolicy = "Retain"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Present state of a model. `scale` has the field names of `Scale`."""

    prod: str
    split: Mapping[str, int]
    scale: Mapping[str, float | str | None]
    is_servable: bool  # `prod` can serve requests, also while at zero
    versions: int
    replicas: int


@dataclass(frozen=True, slots=True)
class TenantFacts:
    """Present state of a tenant. `limits` has the field names of `Limits`."""

    suspended: bool
    limits: Mapping[str, object]
    models: int


S = TypeVar("S", bound=_Spec)


def model_spec(obj: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Model object. Raises Refused(InvalidRequest)."""
    return _spec(obj, ModelSpec)


def tenant_spec(obj: Mapping[str, Any]) -> TenantSpec:
    """Return the spec of a Tenant object, which may be empty. Raises Refused(InvalidRequest)."""
    return _spec(obj, TenantSpec)


def _spec(obj: Mapping[str, Any], kind: type[S]) -> S:
    try:
        return convert(obj.get("spec") or {}, kind)
    except msgspec.ValidationError as error:
        raise Refused(InvalidRequest("spec", str(obj["metadata"]["name"]), str(error)[:_MAX_RULE])) from error


def model_drift(spec: ModelSpec, facts: ModelFacts) -> tuple[str, ...]:
    """Return the fields of the spec that do not hold, as paths in the object."""
    found = []
    if spec.prod is not None and not facts.prod.startswith(spec.prod):
        found.append("prod")
    if spec.split and not _is_split(spec.split, facts.split):
        found.append("split")
    return (*found, *_differing_fields("scale", spec.scale.stated_values(), facts.scale))


def tenant_drift(spec: TenantSpec, facts: TenantFacts) -> tuple[str, ...]:
    """Return the fields of the spec that do not hold, as paths in the object."""
    suspended = ("suspended",) if spec.suspended not in (None, facts.suspended) else ()
    return (*suspended, *_differing_fields("limits", spec.limits.stated_values(), facts.limits))


def _differing_fields(within: str, wanted: Mapping[str, Any], held: Mapping[str, Any]) -> Iterable[str]:
    return (f"{within}.{to_camel_case(name)}" for name, value in wanted.items() if held.get(name) != value)


def _is_split(wanted: Mapping[str, int], held: Mapping[str, int]) -> bool:
    found = [[digest for digest in held if digest.startswith(prefix)] for prefix in wanted]
    if len(held) != len(wanted) or any(len(digests) != 1 for digests in found):
        return False
    return all(held[digests[0]] == wanted[prefix] for prefix, digests in zip(wanted, found, strict=True))


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a status. `reason` is one word."""

    type: str
    is_true: bool
    reason: str
    message: str = ""


def applied_condition(failure: Failure | None) -> Condition:
    """Return the condition that tells whether this generation was applied."""
    if failure is None:
        return Condition("Applied", is_true=True, reason="Applied")
    reason = "".join(word.title() for word in failure.code.split("_"))
    return Condition("Applied", is_true=False, reason=reason, message=failure.message)


def in_sync_condition(drift: Sequence[str]) -> Condition:
    """Return the condition that tells whether all fields of the spec hold."""
    if not drift:
        return Condition("InSync", is_true=True, reason="InSync")
    return Condition("InSync", is_true=False, reason="ChangedElsewhere", message=f"differs: {', '.join(drift)}")


def model_ready_condition(facts: ModelFacts | None) -> Condition:
    """Return the condition that tells whether the model can serve requests. It can while at zero."""
    if facts is None:
        return Condition("Ready", is_true=False, reason="NotPushed", message="no version was pushed yet")
    if not facts.is_servable:
        return Condition("Ready", is_true=False, reason="Faulty", message="its version prod is faulty")
    return Condition("Ready", is_true=True, reason="Servable")


def tenant_ready_condition(facts: TenantFacts | None) -> Condition:
    """Return the condition that tells whether the tenant's keys are accepted."""
    if facts is None:
        return Condition("Ready", is_true=False, reason="NotMade")
    if facts.suspended:
        return Condition("Ready", is_true=False, reason="Suspended", message="its keys are refused")
    return Condition("Ready", is_true=True, reason="Active")


def generation_of(obj: Mapping[str, Any]) -> int:
    """Return the generation of the object's spec; 0 if it has none."""
    return int(obj["metadata"].get("generation") or 0)


def applied_generation(obj: Mapping[str, Any]) -> int:
    """Return the last generation that was applied, from the object's status; 0 for none."""
    return int((obj.get("status") or {}).get("appliedGeneration") or 0)


def build_status(
    obj: Mapping[str, Any], applied: int, conditions: Iterable[Condition], now: str, **rest: object
) -> dict[str, object]:
    """Return the object's status at `now` (RFC 3339). An unchanged condition keeps its transition time."""
    generation = generation_of(obj)
    before = {each.get("type"): each for each in (obj.get("status") or {}).get("conditions") or ()}
    condition_rows = []
    for each in conditions:
        value, previous = "True" if each.is_true else "False", before.get(each.type) or {}
        condition_rows.append(
            {
                "type": each.type,
                "status": value,
                "reason": each.reason,
                "message": each.message,
                "observedGeneration": generation,
                "lastTransitionTime": previous.get("lastTransitionTime") if previous.get("status") == value else now,
            }
        )
    return {**rest, "observedGeneration": generation, "appliedGeneration": applied, "conditions": condition_rows}


def model_status(facts: ModelFacts | None) -> dict[str, object]:
    """Return the fields of a model's status beside its conditions."""
    if facts is None:
        return {"versions": 0, "readyReplicas": 0}
    return {"prod": facts.prod, "versions": facts.versions, "readyReplicas": facts.replicas}


def is_being_deleted(obj: Mapping[str, Any]) -> bool:
    """Return whether the object is being deleted."""
    return "deletionTimestamp" in obj["metadata"]


def has_finalizer(obj: Mapping[str, Any]) -> bool:
    """Return whether the object has our finalizer."""
    return FINALIZER in (obj["metadata"].get("finalizers") or ())


def finalizer_patch(obj: Mapping[str, Any], *, finalizer: bool) -> Json:
    """Return our part of an object, with or without the finalizer. Its uid prevents recreating an object that was
    deleted meanwhile.
    """
    metadata = {name: obj["metadata"][name] for name in ("name", "namespace", "uid") if obj["metadata"].get(name)}
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "metadata": {**metadata, "finalizers": [FINALIZER]} if finalizer else metadata,
    }


@dataclass(frozen=True, slots=True)
class ResourceEvent:
    """An Event worth reporting: the object is ready, has failed, or was refused."""

    reason: str  # READY, FAILED or REFUSED
    message: str

    @property
    def is_warning(self) -> bool:
        """Return whether an operator should look at it."""
        return self.reason != READY


def new_events(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[ResourceEvent, ...]:
    """Return the Events of an object whose status was `before` (empty for none) and is `after` now.

    A state that held before is not reported again. `knative/apply/events.py` limits repetitions.
    """
    known = set(_events_of(before))
    return tuple(found for found in _events_of(after) if found not in known)


def _events_of(status: Mapping[str, Any]) -> Iterator[ResourceEvent]:
    if (state_event := _EVENT_STATES.get(str(status.get("state")))) is not None:
        yield ResourceEvent(*state_event)
    conditions = status.get("conditions") or ()
    if any(each.get("reason") == "NotPushed" for each in conditions):  # no refusal: a model may be declared first
        return
    for each in conditions:
        match each.get("type"), each.get("status"), each.get("reason"):
            case "Ready", "True", _:
                yield ResourceEvent(READY, "it takes requests")
            case "Ready", "False", "Faulty":
                yield ResourceEvent(FAILED, str(each.get("message")))
            case "Applied", "False", reason:
                yield ResourceEvent(REFUSED, f"{reason}: {each.get('message')}")
