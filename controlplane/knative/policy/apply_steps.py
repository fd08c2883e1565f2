"""Decide what to do to one object of a cluster so that it is as we want it. Pure; `applier.py` does it.

The API server compares, not we. An object is applied where our labels and annotations, a digest of what we want among
them, are otherwise than our last apply left them; where its spec has changed since (`metadata.generation`); and else
each `CHECK_S`. An apply of what is there already changes nothing. Times are in seconds of any clock that does not step.
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
REPAIR_RESET_S: Final = 120.0  # an object that stayed as it was for so long is repaired at once again
CHECK_S: Final = 1800.0  # an object that seems to be as it should is applied again after so long
MAX_DIFFERENCES: Final = 8  # differences of one object
FOREIGN: Final = "Foreign"  # the reason of what another installation wrote
DIFFERS: Final = "Differs"  # the reason of what the cluster took and made otherwise


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an object is not as it should be, for somebody to read."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ApplyState:
    """What was tried for one object. Forgotten as soon as something else is wanted of it."""

    wanted_digest: str = ""  # of what was tried; empty: of its deletion
    tries: int = 0  # refusals, or repairs soon after one another
    not_before: float = 0.0
    tried_at: float = 0.0
    applied: SpecVersion | None = None  # what our apply made of the object; None: it was not taken
    refusal: Refusal | None = None
    metadata_drift: MetadataDrift = ()  # those that it wrote otherwise than our apply

    @property
    def is_failing(self) -> bool:
        """Whether it was not taken when it was last tried."""
        return self.refusal is not None and self.applied is None


@dataclass(frozen=True, slots=True)
class Apply:
    """Write all of it."""


@dataclass(frozen=True, slots=True)
class Check:
    """Write all of it when there is time: it is probably as it should be already."""


@dataclass(frozen=True, slots=True)
class DeleteObject:
    """Delete that very object."""

    uid: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Too early to try again."""

    until: float


@dataclass(frozen=True, slots=True)
class Settled:
    """There is nothing to do until something changes, or until then."""

    until: float | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """Another installation's, to be left as it is."""

    owner: str


ApplyStep = Apply | Check | DeleteObject | Wait | Settled | Foreign


def decide(wanted: Json | None, seen: Json | None, memory: ApplyState, now: float, installation: str) -> ApplyStep:
    """The next step. `wanted` is stamped; None for both of them is nothing to do.

    What is being deleted is left alone until it is gone. What does not bear our label, or was not written here, is
    never deleted: somebody may have applied what `kelvin models render` prints. What the control plane of another
    installation wrote is neither deleted nor written over.
    """
    if wanted == seen or (seen is not None and "deletionTimestamp" in seen["metadata"]):
        return Settled()
    if wanted is None:
        if seen is None or not is_managed_by(seen, installation):
            return Settled()
        step: ApplyStep = DeleteObject(seen["metadata"]["uid"])
    elif seen is None:
        step = Apply()
    elif (owner := owner_of(seen)) not in (None, installation):
        return Foreign(str(owner))
    else:
        step = _compare(wanted, seen, memory, now)
    if memory.wanted_digest == digest_of(wanted) and memory.not_before > now:
        return step if isinstance(step, Settled) else Wait(memory.not_before)
    return step


def _compare(wanted: Json, seen: Json, memory: ApplyState, now: float) -> ApplyStep:
    metadata_drift = _metadata_drift(wanted, seen)
    if memory.wanted_digest != digest_of(
        wanted
    ):  # who led before may have applied it: what came after that is not known
        return Apply() if metadata_drift else Check()
    if memory.applied != spec_version(seen) or memory.metadata_drift != metadata_drift:
        return Apply()
    until = memory.tried_at + CHECK_S
    return Settled(until) if now < until else Check()


def after_success(wanted: Json | None, answer: Json | None, memory: ApplyState, now: float, luck: float) -> ApplyState:
    """After a step that the cluster took. `answer` is the object as it says it is, `luck` in [0, 1)."""
    again = memory.wanted_digest == digest_of(wanted) and memory.tries > 0 and now - memory.tried_at < REPAIR_RESET_S
    again = again and not memory.is_failing
    tries = memory.tries + 1 if again else 1
    found = () if wanted is None or answer is None else tuple(islice(_field_drift(wanted, answer, ""), MAX_DIFFERENCES))
    return ApplyState(
        wanted_digest=digest_of(wanted),
        tries=tries,
        not_before=now + (RETRY_BACKOFF.after(tries - 1, luck) if again else 0.0),
        tried_at=now,
        applied=None if answer is None else spec_version(answer),
        refusal=Refusal(DIFFERS, "; ".join(found)) if found else None,
        metadata_drift=() if wanted is None or answer is None else _metadata_drift(wanted, answer),
    )


def after_refusal(wanted: Json | None, refusal: Refusal, memory: ApplyState, now: float, luck: float) -> ApplyState:
    """Return the memory after a step that the cluster refused."""
    tries = memory.tries + 1 if memory.is_failing and memory.wanted_digest == digest_of(wanted) else 1
    return ApplyState(digest_of(wanted), tries, now + RETRY_BACKOFF.after(tries, luck), now, refusal=refusal)


def delay_until(memory: ApplyState, until: float) -> ApplyState:
    """Return the memory with no attempt before `until`, because the cluster asked for that."""
    return replace(memory, not_before=max(memory.not_before, until))


def is_managed_by(obj: Json, installation: str) -> bool:
    """Whether it bears our label, and was written by a control plane of this installation, as far as is known."""
    labels, notes = obj["metadata"].get("labels") or {}, obj["metadata"].get("annotations") or {}
    return labels.get(MANAGED_BY) == MANAGER and APPLIED in notes and owner_of(obj) in (None, installation)


def owner_of(obj: Json) -> str | None:
    """The installation whose control plane wrote it; None where nobody said that."""
    noted = (obj["metadata"].get("annotations") or {}).get(INSTALLATION)
    return None if noted is None else str(noted)


def with_digest(obj: Json, installation: str) -> dict[str, Any]:
    """A copy that says whose it is and what it was rendered as, so that a later rendering without some field differs
    from it. What has a stamp already (`owned_part`) keeps it.
    """
    if APPLIED in (obj["metadata"].get("annotations") or {}):
        return dict(obj)
    about = {key: value for key, value in obj["metadata"].items() if key != "annotations"}
    noted = {key: value for key, value in (obj["metadata"].get("annotations") or {}).items() if key != APPLIED}
    noted[INSTALLATION] = installation
    whole = {**obj, "metadata": {**about, "annotations": noted}}
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
    return {**obj, "metadata": {**about, "annotations": {**noted, APPLIED: digest}}}


def digest_of(wanted: Json | None) -> str:
    """Of a stamped object; empty for one that is not wanted."""
    return "" if wanted is None else str(wanted["metadata"]["annotations"][APPLIED])


def spec_version(obj: Json) -> SpecVersion:
    """Return which object it is and how often its spec has changed; 0 for a kind that does not count it."""
    return obj["metadata"]["uid"], obj["metadata"].get("generation", 0)


def _metadata_drift(wanted: Json, obj: Json) -> MetadataDrift:
    """Return our labels and annotations that the object has otherwise."""
    found: list[tuple[str, str, str | None]] = []
    for kind in ("labels", "annotations"):
        noted = obj["metadata"].get(kind) or {}
        named = wanted["metadata"].get(kind) or {}
        found += [(kind, name, noted.get(name)) for name, value in named.items() if noted.get(name) != value]
    return tuple(found)


def _field_drift(wanted: Any, answer: Any, path: str) -> Iterator[str]:
    """Yield the fields that the cluster made otherwise than they were applied, each as a line says it."""
    if isinstance(wanted, Mapping) and isinstance(answer, Mapping):
        for key, value in wanted.items():
            yield from _field_drift(value, answer.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(wanted, list) and isinstance(answer, list) and len(wanted) == len(answer):
        for index, (one, other) in enumerate(zip(wanted, answer, strict=True)):
            yield from _field_drift(one, other, f"{path}[{index}]")
    elif wanted != answer:
        yield f"{path} is {_shorten(answer)}, not {_shorten(wanted)}"


def _managed_fields(seen: Json) -> Json:
    """The fields of an object that our applies own."""
    for entry in seen["metadata"].get("managedFields") or ():
        if (entry.get("manager"), entry.get("operation"), entry.get("subresource", "")) == (MANAGER, "Apply", ""):
            fields: Json = entry.get("fieldsV1") or {}
            return fields
    return {}


def owned_part(seen: Json) -> dict[str, Any]:
    """Return what our last apply said of an object, its stamp included. To apply that again changes nothing."""
    head = {"apiVersion": seen["apiVersion"], "kind": seen["kind"]}
    part = _select_owned(
        {key: value for key, value in seen.items() if key not in (*head, "status")}, _managed_fields(seen)
    )
    about = {key: seen["metadata"][key] for key in ("name", "namespace") if key in seen["metadata"]}
    return {**head, **part, "metadata": {**part.get("metadata", {}), **about}}


def _select_owned(obj: Json, fields: Json) -> dict[str, Any]:
    """Lists are taken whole."""
    found: dict[str, Any] = {}
    for key, value in obj.items():
        mine = fields.get(f"f:{key}")
        if mine is not None:
            found[key] = _select_owned(value, mine) if mine and isinstance(value, Mapping) else value
    return found


def _shorten(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str) if value is not None else "missing"
    return text if len(text) <= 80 else f"{text[:79]}…"
