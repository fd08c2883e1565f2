"""Decide which Services get the wanted rendering now: the wanted image and the other fields that Kelvin chooses.

A new rendering makes Knative start a new Revision, so it is rolled out in waves. A change of scale is not part of it:
it is written at once, with the rendering that the Service has. Every decision follows from the cluster's objects, so a
control plane that takes over continues the roll-out.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from contracts.doubling import Doubling
from contracts.numbers import whole_number
from contracts.wire import Wire
from controlplane.policy.knative_seen import condition
from controlplane.policy.knative_service import AUTOSCALING, SCALE
from controlplane.policy.labels import APPLIED, ATTEMPT, RENDERING, Place

Json = Mapping[str, Any]

WAVE: Final = 5  # Services whose new Revision may be starting at the same time
PAUSES: Final = Doubling(600.0, 21_600.0)  # after a new Revision failed, until the next one is tried
INITIAL_SCALE: Final = f"{AUTOSCALING}/initial-scale"


class Stage(StrEnum):
    """How far a Service is with the wanted rendering."""

    WAITING = "waiting"  # it has another rendering, and its turn has not come
    WRITING = "writing"  # its turn has come, and it still has another rendering
    REFUSED = "refused"  # as WRITING, but the cluster does not take the wanted rendering
    STARTING = "starting"  # Knative has not said yet what became of its newest Revision
    READY = "ready"
    FAILED = "failed"  # its newest Revision never was ready; an older one serves
    NEUTRAL = "neutral"  # it has the rendering and tells nothing about it: it is new, or failed after it was ready


OUTDATED: Final = frozenset({Stage.WAITING, Stage.WRITING, Stage.REFUSED})


class ImageBehind(Wire, frozen=True):
    """Why a version on a cluster still runs an earlier image, or earlier settings of Kelvin's own, and since when the
    leader knows.

    `reason` is `waiting` (for its turn), `starting`, `failed` (its new revision), `refused` (by the cluster), or
    `unreadable` (its Service).
    """

    reason: str
    message: str
    since_s: int  # Unix time


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling:
    """The facts about one Service that decide when its turn comes."""

    place: Place
    stage: Stage
    is_sound: bool = True  # its newest Revision is ready, whatever its rendering
    was_ready: bool = True  # some Revision of it was ready once
    is_awake: bool = False  # it has pods, or keeps some
    is_proof: bool = False  # its newest Revision started a pod: being ready, it proves the rendering
    attempts: int = 0  # Revisions that were made for the wanted rendering
    failed_at_s: float | None = None  # Unix time, in FAILED and REFUSED

    @property
    def is_failure(self) -> bool:
        """Whether it speaks against the rendering. A Service that never was ready does not."""
        return self.failed_at_s is not None and self.was_ready


def admit(services: Iterable[Rolling], now_s: float) -> tuple[tuple[Place, ...], bool]:
    """Return the Services whose turn comes now, and whether the rendering is proven: a pod became ready with it.

    1. After a failure, no Service until a pause is over. The pause doubles with each failed attempt.
    2. While the rendering is not proven, one Service at a time: the canary.
    3. Then `WAVE` at a time, less one for each failure, and at least one.

    Services that were not tried yet come first, then sound ones, then those with pods.
    """
    every = tuple(services)
    is_proven = any(each.stage is Stage.READY and each.is_proof for each in every)
    failed = [each for each in every if each.is_failure]
    # (1)
    if failed:
        since_s = max(min(each.failed_at_s or 0.0, now_s) for each in failed)
        if now_s < since_s + PAUSES.after(sum(max(1, each.attempts) for each in failed)):
            return (), is_proven
    # (2) and (3)
    limit = max(1, WAVE - len(failed)) if is_proven else 1
    room = limit - sum(each.stage in (Stage.WRITING, Stage.STARTING) for each in every)
    if room <= 0:
        return (), is_proven
    candidates = (each for each in every if each.stage in (Stage.WAITING, Stage.FAILED))
    chosen = heapq.nsmallest(
        room, candidates, key=lambda each: (each.attempts, not each.is_sound, not each.is_awake, each.place)
    )
    return tuple(each.place for each in chosen), is_proven


def rolling_of(
    wanted: Json, seen: Json, *, is_awake: bool, is_admitted: bool, refused_at_s: float | None, now_s: float
) -> Rolling:
    """Return the facts of one Service.

    `is_admitted`: its turn has come. `refused_at_s`: since when the cluster refuses the wanted rendering, else None.
    """
    newest, status = _newest_of(seen), seen.get("status") or {}
    ready = status.get("latestReadyRevisionName")
    failed_at_s = None
    if rendering_of(seen) != rendering_of(wanted):
        stage = Stage.WAITING
        if is_admitted:
            stage, failed_at_s = Stage.WRITING if refused_at_s is None else Stage.REFUSED, refused_at_s
    elif newest is Stage.FAILED and ready and ready != status.get("latestCreatedRevisionName"):
        stage, failed_at_s = newest, _since_s(condition(seen, "ConfigurationsReady"), now_s)
    elif newest is Stage.FAILED or (newest is Stage.STARTING and seen["metadata"].get("generation") == 1):
        stage = Stage.NEUTRAL
    else:
        stage = newest
    return Rolling(
        place=(seen["metadata"].get("namespace") or "", seen["metadata"]["name"]),
        stage=stage,
        is_sound=newest is Stage.READY,
        was_ready=bool(ready),
        is_awake=is_awake,
        is_proof=notes_of(seen).get(INITIAL_SCALE) != "0",
        attempts=0 if stage in OUTDATED else attempts_of(seen),
        failed_at_s=failed_at_s,
    )


def _newest_of(seen: Json) -> Stage:
    """Return what became of the newest Revision: STARTING, READY or FAILED."""
    status = seen.get("status") or {}
    if status.get("observedGeneration") != seen["metadata"].get("generation"):
        return Stage.STARTING
    match condition(seen, "ConfigurationsReady").get("status"):
        case "True":
            return Stage.READY
        case "False":
            return Stage.FAILED
    return Stage.STARTING


def _since_s(of: Json, now_s: float) -> float:
    """Return when a condition changed last, in Unix time; `now_s` where it does not say."""
    try:
        return datetime.fromisoformat(str(of.get("lastTransitionTime"))).timestamp()
    except (ValueError, OverflowError):
        return now_s


def rendering_of(obj: Json) -> str | None:
    """Return the digest of a Service's rendering; None if the build that wrote it noted none."""
    noted = (obj["metadata"].get("annotations") or {}).get(RENDERING)
    return None if noted is None else str(noted)


def notes_of(obj: Json) -> Mapping[str, str]:
    """Return the annotations of a Service's template."""
    template = (obj.get("spec") or {}).get("template") or {}
    return (template.get("metadata") or {}).get("annotations") or {}


def scale_of(obj: Json) -> dict[str, str]:
    """Return the annotations of a Service's template that say how it is scaled."""
    return {name: value for name, value in notes_of(obj).items() if name in SCALE}


def attempts_of(seen: Json) -> int:
    """Return how many Revisions were made for a Service's rendering."""
    return whole_number(str(notes_of(seen).get(ATTEMPT, ""))) or 1


def with_notes(obj: Json, notes: Mapping[str, str | None]) -> dict[str, Any]:
    """Return a copy of a Service with these annotations set in its template. None removes an annotation."""
    spec = obj.get("spec") or {}
    template = spec.get("template") or {}
    merged = {name: value for name, value in {**notes_of(obj), **notes}.items() if value is not None}
    about = {**(template.get("metadata") or {}), "annotations": merged}
    return {**obj, "spec": {**spec, "template": {**template, "metadata": about}}}


def held_back(part: dict[str, Any], wanted: Json, initial_scale: str | None) -> dict[str, Any]:
    """Return a Service as it was last applied (`part`, see `owned_part`), with the wanted scale.

    If the scale is the same, `part` is returned as it is, with its stamp.
    """
    scale = scale_of(wanted)
    if scale_of(part) == scale:
        return part
    found = with_notes(part, {**dict.fromkeys(SCALE), **scale, INITIAL_SCALE: initial_scale})
    about = found["metadata"]
    notes = {name: value for name, value in (about.get("annotations") or {}).items() if name != APPLIED}
    return {**found, "metadata": {**about, "annotations": notes}}


def kept(wanted: dict[str, Any], seen: Json, initial_scale: str | None) -> dict[str, Any]:
    """Return the wanted Service with the annotations that were chosen when its rendering was written.

    Other annotations would make Knative start another Revision. `initial_scale` counts only if the scale changes.
    """
    noted, attempts = notes_of(seen), attempts_of(seen)
    if scale_of(seen) == scale_of(wanted):
        initial_scale = "0" if noted.get(INITIAL_SCALE) == "0" else None
    attempt = str(attempts) if attempts > 1 else None
    if initial_scale is None and attempt is None:
        return wanted
    return with_notes(wanted, {INITIAL_SCALE: initial_scale, ATTEMPT: attempt})
