"""Decide the next step for one object of a cluster, so that it becomes as wanted. Pure; `applier.py` carries it out.

The API server compares objects, not Kelvin. Kelvin applies an object again if our labels or annotations (which include
a digest of the wanted state) differ from what the last apply left, if the spec has changed since
(`metadata.generation`), or after CHECK_S. An apply without changes has no effect. Times are seconds of a clock that
never steps.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from controlplane.knative.policy.object_labels import APPLIED, INSTALLATION, MANAGED_BY, MANAGER
from kelvin.contracts.backoff import ExponentialBackoff

Json = Mapping[str, Any]
SpecVersion = tuple[str, int]  # uid and `metadata.generation` of an object
MetadataDrift = tuple[tuple[str, str, str | None], ...]  # "labels" or "annotations", name, value; None: it is missing

RETRY_BACKOFF: Final = ExponentialBackoff(1.0, 300.0)
REPAIR_RESET_S: Final = 120.0  # after this time without a change, the next repair comes at once
CHECK_S: Final = 1800.0  # an object that seems as wanted is applied again after this time
MAX_DIFFERENCES: Final = 8  # reported for one object
FOREIGN: Final = "Foreign"  # reason: another installation wrote the object
DIFFERS: Final = "Differs"  # reason: the cluster accepted the object and changed it


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an object is not as wanted: one word, and a message for operators."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ApplyState:
    """The attempts for one object. Forgotten as soon as its wanted state changes."""

    wanted_digest: str = ""  # of the attempted state; empty: of a deletion
    tries: int = 0  # refusals, or repairs in quick succession
    not_before: float = 0.0
    tried_at: float = 0.0
    applied: SpecVersion | None = None  # the object after our apply; None: the cluster refused it
    refusal: Refusal | None = None
    metadata_drift: MetadataDrift = ()  # our metadata that the cluster changed in our apply

    @property
    def is_failing(self) -> bool:
        """Return whether the cluster refused the last attempt."""
        return self.refusal is not None and self.applied is None


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the whole object."""


@dataclass(frozen=True, slots=True)
class Check:
    """Apply the whole object when there is time. It is probably as wanted already."""


@dataclass(frozen=True, slots=True)
class DeleteObject:
    """Delete the object with this uid only."""

    uid: str


@dataclass(frozen=True, slots=True)
class Wait:
    """It is too early to try again before `until`."""

    until: float


@dataclass(frozen=True, slots=True)
class Settled:
    """There is nothing to do until something changes, or until `until`."""

    until: float | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """The object belongs to another installation and is left alone."""

    owner: str


ApplyStep = Apply | Check | DeleteObject | Wait | Settled | Foreign


def decide(wanted: Json | None, observed: Json | None, state: ApplyState, now: float, installation: str) -> ApplyStep:
    """Return the next step. `wanted` has its digest; it is None for an object that is not wanted.

    1. The object is as wanted, or is being deleted: do nothing.
    2. It is not wanted: delete it if this installation wrote it. It stays if it lacks our marks: an operator may have
       applied the output of `kelvin models render`.
    3. It does not exist: apply it.
    4. Another installation wrote it: leave it alone.
    5. Otherwise compare it with the last apply.
    6. After a refusal or repair of the same wanted state: wait for the back-off.
    """
    # (1)
    if wanted == observed or (observed is not None and "deletionTimestamp" in observed["metadata"]):
        return Settled()
    # (2)
    if wanted is None:
        if observed is None or not is_managed_by(observed, installation):
            return Settled()
        step: ApplyStep = DeleteObject(observed["metadata"]["uid"])
    # (3)
    elif observed is None:
        step = Apply()
    # (4)
    elif is_foreign(observed, installation):
        return Foreign(str(owner_of(observed)))
    # (5)
    else:
        step = _compare(wanted, observed, state, now)
    # (6)
    if state.wanted_digest == digest_of(wanted) and state.not_before > now:
        return step if isinstance(step, Settled) else Wait(state.not_before)
    return step


def _compare(wanted: Json, observed: Json, state: ApplyState, now: float) -> ApplyStep:
    metadata_drift = _metadata_drift(wanted, observed)
    # An earlier leader may have applied this state. Later changes to the object are unknown.
    if state.wanted_digest != digest_of(wanted):
        return Apply() if metadata_drift else Check()
    if state.applied != spec_version(observed) or state.metadata_drift != metadata_drift:
        return Apply()
    until = state.tried_at + CHECK_S
    return Settled(until) if now < until else Check()


def after_success(wanted: Json | None, response: Json | None, state: ApplyState, now: float, luck: float) -> ApplyState:
    """Return the state after a successful step. `response` is the returned object; `luck` is in [0, 1)."""
    again = state.wanted_digest == digest_of(wanted) and state.tries > 0 and now - state.tried_at < REPAIR_RESET_S
    again = again and not state.is_failing
    tries = state.tries + 1 if again else 1
    found = (
        () if wanted is None or response is None else tuple(islice(_field_drift(wanted, response, ""), MAX_DIFFERENCES))
    )
    return ApplyState(
        wanted_digest=digest_of(wanted),
        tries=tries,
        not_before=now + (RETRY_BACKOFF.delay_s(tries - 1, luck) if again else 0.0),
        tried_at=now,
        applied=None if response is None else spec_version(response),
        refusal=Refusal(DIFFERS, "; ".join(found)) if found else None,
        metadata_drift=() if wanted is None or response is None else _metadata_drift(wanted, response),
    )


def after_refusal(wanted: Json | None, refusal: Refusal, state: ApplyState, now: float, luck: float) -> ApplyState:
    """Return the state after a step that the cluster refused."""
    tries = state.tries + 1 if state.is_failing and state.wanted_digest == digest_of(wanted) else 1
    return ApplyState(digest_of(wanted), tries, now + RETRY_BACKOFF.delay_s(tries, luck), now, refusal=refusal)


def delay_until(state: ApplyState, until: float) -> ApplyState:
    """Return the state with no attempt before `until`, because the cluster asked for that."""
    return replace(state, not_before=max(state.not_before, until))


def is_managed_by(obj: Json, installation: str) -> bool:
    """Return whether the object has our label, and this installation's control plane wrote it, as far as is known."""
    labels, annotations = obj["metadata"].get("labels") or {}, obj["metadata"].get("annotations") or {}
    return labels.get(MANAGED_BY) == MANAGER and APPLIED in annotations and not is_foreign(obj, installation)


def is_foreign(obj: Json, installation: str) -> bool:
    """Return whether another installation's control plane wrote the object. An object without a mark is not foreign."""
    return owner_of(obj) not in (None, installation)


def owner_of(obj: Json) -> str | None:
    """Return the installation whose control plane wrote the object; None if it is not marked."""
    owner = (obj["metadata"].get("annotations") or {}).get(INSTALLATION)
    return None if owner is None else str(owner)


def with_digest(obj: Json, installation: str) -> dict[str, Any]:
    """Return a copy with the installation and a digest of its content, so that a later rendering without some field
    differs. An object that has a digest already (`owned_part`) keeps it.
    """
    if APPLIED in (obj["metadata"].get("annotations") or {}):
        return dict(obj)
    metadata = {key: value for key, value in obj["metadata"].items() if key != "annotations"}
    annotations = {key: value for key, value in (obj["metadata"].get("annotations") or {}).items() if key != APPLIED}
    annotations[INSTALLATION] = installation
    whole = {**obj, "metadata": {**metadata, "annotations": annotations}}
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
    return {**obj, "metadata": {**metadata, "annotations": {**annotations, APPLIED: digest}}}


def digest_of(wanted: Json | None) -> str:
    """Return the digest of a wanted object; empty if it is not wanted."""
    return "" if wanted is None else str(wanted["metadata"]["annotations"][APPLIED])


def spec_version(obj: Json) -> SpecVersion:
    """Return the object's uid and how often its spec has changed; 0 for a kind that does not count changes."""
    return obj["metadata"]["uid"], obj["metadata"].get("generation", 0)


def _metadata_drift(wanted: Json, obj: Json) -> MetadataDrift:
    """Return our labels and annotations whose values differ in the object."""
    found: list[tuple[str, str, str | None]] = []
    for kind in ("labels", "annotations"):
        actual = obj["metadata"].get(kind) or {}
        expected = wanted["metadata"].get(kind) or {}
        found += [(kind, name, actual.get(name)) for name, value in expected.items() if actual.get(name) != value]
    return tuple(found)


def _field_drift(wanted: Any, response: Any, path: str) -> Iterator[str]:
    """Yield the fields that the cluster changed when it accepted the object, each as one line of text."""
    if isinstance(wanted, Mapping) and isinstance(response, Mapping):
        for key, value in wanted.items():
            yield from _field_drift(value, response.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(wanted, list) and isinstance(response, list) and len(wanted) == len(response):
        for index, (one, other) in enumerate(zip(wanted, response, strict=True)):
            yield from _field_drift(one, other, f"{path}[{index}]")
    elif wanted != response:
        yield f"{path} is {_shorten(response)}, not {_shorten(wanted)}"


def _managed_fields(observed: Json) -> Json:
    """Return the fields of an object that our applies own."""
    for entry in observed["metadata"].get("managedFields") or ():
        if (entry.get("manager"), entry.get("operation"), entry.get("subresource", "")) == (MANAGER, "Apply", ""):
            fields: Json = entry.get("fieldsV1") or {}
            return fields
    return {}


def owned_part(observed: Json) -> dict[str, Any]:
    """Return the state that our last apply set, including its digest. Applying it again changes nothing."""
    head = {"apiVersion": observed["apiVersion"], "kind": observed["kind"]}
    part = _select_owned(
        {key: value for key, value in observed.items() if key not in (*head, "status")}, _managed_fields(observed)
    )
    metadata = {key: observed["metadata"][key] for key in ("name", "namespace") if key in observed["metadata"]}
    return {**head, **part, "metadata": {**part.get("metadata", {}), **metadata}}


def _select_owned(obj: Json, fields: Json) -> dict[str, Any]:
    """Return the owned part of a mapping. Lists are taken as a whole."""
    found: dict[str, Any] = {}
    for key, value in obj.items():
        owned_fields = fields.get(f"f:{key}")
        if owned_fields is not None:
            found[key] = _select_owned(value, owned_fields) if owned_fields and isinstance(value, Mapping) else value
    return found


def _shorten(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str) if value is not None else "missing"
    return text if len(text) <= 80 else f"{text[:79]}…"
