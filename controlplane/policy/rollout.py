"""Decide when Services get another rendering: another image, or other fields that are Kelvin's own. Pure.

Each such change makes Knative start a new Revision, so Services get it in waves. What an operator or tenant changes
(the scale) is no part of it and is written at once, without the new rendering. All that is decided here follows from
the objects of the cluster, so that another control plane goes on where the one before it ended.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from contracts.doubling import Doubling
from contracts.numbers import whole_number
from controlplane.policy.knative_seen import condition
from controlplane.policy.knative_service import AUTOSCALING, SCALE
from controlplane.policy.labels import APPLIED, ATTEMPT, RENDERING, Place

Json = Mapping[str, Any]

WAVE: Final = 5  # Services whose new Revision may be starting at the same time
PAUSES: Final = Doubling(600.0, 21_600.0)  # after a new Revision failed, until the next one is tried
INITIAL_SCALE: Final = f"{AUTOSCALING}/initial-scale"


class Stage(StrEnum):
    """How far a Service is with the rendering that is wanted."""

    BEHIND = "behind"  # it has another one
    STARTING = "starting"  # Knative has not said yet what became of its newest Revision
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Behind:
    """Why a version still runs the image, or another rendering, of before. `since_s` is Unix time."""

    reason: str  # "waiting", "starting", "failed" or "refused"
    message: str
    since_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling:
    """A Service, as far as its turn depends on it."""

    place: Place
    stage: Stage
    is_new: bool = False  # it was made with the wanted rendering and never changed since
    is_proof: bool = False  # its newest Revision started a pod
    has_older: bool = True  # a Revision of it was ready once, and is not the one that failed
    is_awake: bool = False
    newest: Stage = Stage.READY  # what became of its newest Revision, whatever the rendering of that
    is_sound: bool = True  # a Revision of it was ready once, and its newest one did not fail
    attempts: int = 0  # Revisions that were made for the wanted rendering
    is_admitted: bool = False  # it was its turn; writing it is under way, or refused
    failed_at_s: float | None = None

    @property
    def is_failure(self) -> bool:
        """Whether it speaks against the rendering. What was never ready before has nothing to say about that."""
        return self.failed_at_s is not None and self.has_older


def admit(services: Iterable[Rolling], now_s: float) -> tuple[tuple[Place, ...], bool]:
    """Return whose turn it is now, and whether the rendering is proven: some pod has become ready with it.

    1. As long as it is not proven, one Service at a time: the canary. One that has pods comes first.
    2. Then `WAVE` at a time.
    3. After a failure nobody for a while, twice as long after each; then fewer at a time. Every Service has a first
       try before one that failed has its second.
    """
    every = tuple(services)
    is_proven = any(each.stage is Stage.READY and each.is_proof for each in every)
    failed = [each for each in every if each.is_failure]
    limit = max(1, WAVE - len(failed)) if is_proven else 1
    # (3)
    if failed:
        since_s = max(min(each.failed_at_s or 0.0, now_s) for each in failed)
        if now_s < since_s + PAUSES.after(sum(max(1, each.attempts) for each in failed)):
            return (), is_proven
    under_way = sum(
        (each.stage is Stage.STARTING and not each.is_new)
        or (each.stage is Stage.BEHIND and each.is_admitted and each.failed_at_s is None)
        for each in every
    )
    candidates = [
        each
        for each in every
        if (each.stage is Stage.BEHIND and not each.is_admitted) or (each.stage is Stage.FAILED and each.has_older)
    ]
    candidates.sort(key=lambda each: (each.attempts, not each.is_sound, not each.is_awake, each.place))
    return tuple(each.place for each in candidates[: max(0, limit - under_way)]), is_proven


def newest_of(seen: Json) -> Stage:
    """Return what became of the newest Revision: never `BEHIND`."""
    status = seen.get("status") or {}
    if status.get("observedGeneration") != seen["metadata"].get("generation"):
        return Stage.STARTING
    match condition(seen, "ConfigurationsReady").get("status"):
        case "True":
            return Stage.READY
        case "False":
            return Stage.FAILED
    return Stage.STARTING


def rolling_of(
    wanted: Json, seen: Json, *, is_awake: bool, is_admitted: bool, refused_at_s: float | None, now_s: float
) -> Rolling:
    """Return the facts of one Service. `refused_at_s`: since when the cluster does not take the new rendering of it."""
    newest, status = newest_of(seen), seen.get("status") or {}
    stage = newest if rendering_of(seen) == rendering_of(wanted) else Stage.BEHIND
    ready = status.get("latestReadyRevisionName")
    failed_at_s = _since_s(condition(seen, "ConfigurationsReady"), now_s) if stage is Stage.FAILED else None
    return Rolling(
        place=(seen["metadata"].get("namespace") or "", seen["metadata"]["name"]),
        stage=stage,
        is_new=seen["metadata"].get("generation") == 1,
        is_proof=notes_of(seen).get(INITIAL_SCALE) != "0",
        has_older=bool(ready) and (stage is not Stage.FAILED or ready != status.get("latestCreatedRevisionName")),
        is_awake=is_awake,
        newest=newest,
        is_sound=bool(ready) and newest is not Stage.FAILED,
        attempts=0 if stage is Stage.BEHIND else attempts_of(seen),
        is_admitted=is_admitted,
        failed_at_s=refused_at_s if stage is Stage.BEHIND and is_admitted else failed_at_s,
    )


def _since_s(of: Json, now_s: float) -> float:
    try:
        return datetime.fromisoformat(str(of.get("lastTransitionTime"))).timestamp()
    except (ValueError, OverflowError):
        return now_s


def rendering_of(obj: Json) -> str | None:
    """Return the digest by which a Service was rendered; None for one of a build that wrote none."""
    noted = (obj["metadata"].get("annotations") or {}).get(RENDERING)
    return None if noted is None else str(noted)


def notes_of(obj: Json) -> Mapping[str, str]:
    """Return the annotations of a Service's template."""
    template = (obj.get("spec") or {}).get("template") or {}
    return (template.get("metadata") or {}).get("annotations") or {}


def scale_of(obj: Json) -> dict[str, str]:
    """Return those that say how it is scaled."""
    return {name: value for name, value in notes_of(obj).items() if name in SCALE}


def attempts_of(seen: Json) -> int:
    """Return how many Revisions were made for its rendering."""
    return whole_number(str(notes_of(seen).get(ATTEMPT, ""))) or 1


def with_notes(obj: Json, notes: Mapping[str, str | None]) -> dict[str, Any]:
    """Return a copy whose template has these annotations; without those that are None."""
    spec = obj.get("spec") or {}
    template = spec.get("template") or {}
    merged = {name: value for name, value in {**notes_of(obj), **notes}.items() if value is not None}
    about = {**(template.get("metadata") or {}), "annotations": merged}
    return {**obj, "spec": {**spec, "template": {**template, "metadata": about}}}


def held_back(part: dict[str, Any], wanted: Json, initial_scale: str | None) -> dict[str, Any]:
    """Return the Service as it was last applied, with the scale that is wanted now.

    `part` is what that apply said (`owned_part`). It keeps its stamp where the scale is the same.
    """
    scale = scale_of(wanted)
    if scale_of(part) == scale:
        return part
    found = with_notes(part, {**dict.fromkeys(SCALE), **scale, INITIAL_SCALE: initial_scale})
    about = found["metadata"]
    notes = {name: value for name, value in (about.get("annotations") or {}).items() if name != APPLIED}
    return {**found, "metadata": {**about, "annotations": notes}}


def kept(wanted: dict[str, Any], seen: Json, initial_scale: str | None) -> dict[str, Any]:
    """Return what is wanted of a Service that has the rendering: with the annotations that were chosen when it was
    written, as another choice would be a Revision more.
    """
    noted, attempts = notes_of(seen), attempts_of(seen)
    if scale_of(seen) == scale_of(wanted):
        initial_scale = "0" if noted.get(INITIAL_SCALE) == "0" else None
    attempt = str(attempts) if attempts > 1 else None
    if initial_scale is None and attempt is None:
        return wanted
    return with_notes(wanted, {INITIAL_SCALE: initial_scale, ATTEMPT: attempt})
