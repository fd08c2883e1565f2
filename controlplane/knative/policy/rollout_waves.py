"""Decide which Services get the new rendering now: a new image, or other fields that Kelvin chooses.

A new rendering makes Knative start a new Revision, so it is rolled out in waves. A change of scale is not part of it:
it is written at once, with the Service's present rendering. Every decision follows from the cluster's objects, so a
control plane that takes over continues the roll-out.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from controlplane.knative.policy.knative_service import AUTOSCALING, SCALE
from controlplane.knative.policy.object_labels import APPLIED, ATTEMPT, RENDERING, NamespacedName
from controlplane.knative.policy.object_status import condition, parse_time_s
from kelvin.contracts.backoff import ExponentialBackoff
from kelvin.contracts.numbers import parse_whole_number
from kelvin.contracts.wire import Wire

Json = Mapping[str, Any]

WAVE_SIZE: Final = 5  # Services whose new Revision may be starting at the same time
FAILURE_PAUSES: Final = ExponentialBackoff(600.0, 21_600.0)  # from a failed Revision until the next one is tried
INITIAL_SCALE: Final = f"{AUTOSCALING}/initial-scale"


class RolloutStage(StrEnum):
    """How far a Service is with the new rendering."""

    WAITING = "waiting"  # it has an older rendering, and its turn has not come
    WRITING = "writing"  # its turn has come, but it still has an older rendering
    REFUSED = "refused"  # as WRITING, but the cluster refuses the new rendering
    STARTING = "starting"  # Knative has not decided yet whether its newest Revision works
    READY = "ready"
    FAILED = "failed"  # its newest Revision was never ready; an older one serves
    NEUTRAL = "neutral"  # it has the rendering but proves nothing: it is new, or failed after it was ready


OUTDATED: Final = frozenset({RolloutStage.WAITING, RolloutStage.WRITING, RolloutStage.REFUSED})


class ImageBehind(Wire, frozen=True):
    """Why a version on a cluster still has an earlier image or earlier settings of Kelvin's own, and since when.

    `reason` is `waiting` (for its turn), `starting`, `failed` (its new revision), `refused` (by the cluster), or
    `unreadable` (its Service).
    """

    reason: str
    message: str
    since_s: int  # Unix time at which the leader noticed it


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRollout:
    """The facts about one Service that decide when its turn comes."""

    object_name: NamespacedName
    stage: RolloutStage
    is_sound: bool = True  # its newest Revision is ready, whatever its rendering
    was_ready: bool = True  # some Revision of it was ready once
    is_awake: bool = False  # it has pods, or has a minimum
    is_proof: bool = False  # its newest Revision started a pod, so its readiness proves the rendering
    attempts: int = 0  # Revisions that were made for the new rendering
    failed_at_s: float | None = None  # Unix time, in FAILED and REFUSED

    @property
    def is_failure(self) -> bool:
        """Return whether it speaks against the rendering. A Service that was never ready does not."""
        return self.failed_at_s is not None and self.was_ready


def admit_next_wave(services: Iterable[ServiceRollout], now_s: float) -> tuple[tuple[NamespacedName, ...], bool]:
    """Return the Services whose turn comes now, and whether the rendering is proven: a pod became ready with it.

    1. After a failure, no Service until a pause is over. The pause doubles with each failed attempt.
    2. While the rendering is not proven, one Service at a time: the canary.
    3. Then `WAVE_SIZE` at a time, less one for each failure, and at least one.

    Services that were not tried yet come first, then sound ones, then those with pods.
    """
    every = tuple(services)
    is_proven = any(each.stage is RolloutStage.READY and each.is_proof for each in every)
    failed = [each for each in every if each.is_failure]
    # (1)
    if failed:
        since_s = max(min(each.failed_at_s or 0.0, now_s) for each in failed)
        if now_s < since_s + FAILURE_PAUSES.delay_s(sum(max(1, each.attempts) for each in failed)):
            return (), is_proven
    # (2) and (3)
    limit = max(1, WAVE_SIZE - len(failed)) if is_proven else 1
    room = limit - sum(each.stage in (RolloutStage.WRITING, RolloutStage.STARTING) for each in every)
    if room <= 0:
        return (), is_proven
    candidates = (each for each in every if each.stage in (RolloutStage.WAITING, RolloutStage.FAILED))
    chosen = heapq.nsmallest(
        room, candidates, key=lambda each: (each.attempts, not each.is_sound, not each.is_awake, each.object_name)
    )
    return tuple(each.object_name for each in chosen), is_proven


def parse_service_rollout(
    wanted: Json, observed: Json, *, is_awake: bool, is_admitted: bool, refused_at_s: float | None, now_s: float
) -> ServiceRollout:
    """Return the facts of one Service.

    `is_admitted`: its turn has come. `refused_at_s`: since when the cluster refuses the new rendering, else None.
    """
    newest, status = _newest_revision_stage(observed), observed.get("status") or {}
    ready = status.get("latestReadyRevisionName")
    failed_at_s = None
    if rendering_of(observed) != rendering_of(wanted):
        stage = RolloutStage.WAITING
        if is_admitted:
            stage, failed_at_s = RolloutStage.WRITING if refused_at_s is None else RolloutStage.REFUSED, refused_at_s
    elif newest is RolloutStage.FAILED and ready and ready != status.get("latestCreatedRevisionName"):
        changed_s = parse_time_s(condition(observed, "ConfigurationsReady").get("lastTransitionTime"))
        stage, failed_at_s = newest, now_s if changed_s is None else changed_s
    elif newest is RolloutStage.FAILED or (
        newest is RolloutStage.STARTING and observed["metadata"].get("generation") == 1
    ):
        stage = RolloutStage.NEUTRAL
    else:
        stage = newest
    return ServiceRollout(
        object_name=(observed["metadata"].get("namespace") or "", observed["metadata"]["name"]),
        stage=stage,
        is_sound=newest is RolloutStage.READY,
        was_ready=bool(ready),
        is_awake=is_awake,
        is_proof=template_annotations(observed).get(INITIAL_SCALE) != "0",
        attempts=0 if stage in OUTDATED else attempts_of(observed),
        failed_at_s=failed_at_s,
    )


def _newest_revision_stage(observed: Json) -> RolloutStage:
    """Return the stage of the newest Revision: STARTING, READY or FAILED."""
    status = observed.get("status") or {}
    if status.get("observedGeneration") != observed["metadata"].get("generation"):
        return RolloutStage.STARTING
    match condition(observed, "ConfigurationsReady").get("status"):
        case "True":
            return RolloutStage.READY
        case "False":
            return RolloutStage.FAILED
    return RolloutStage.STARTING


def rendering_of(obj: Json) -> str | None:
    """Return the digest of a Service's rendering; None if it was written by a build without digests."""
    digest = (obj["metadata"].get("annotations") or {}).get(RENDERING)
    return None if digest is None else str(digest)


def template_annotations(obj: Json) -> Mapping[str, str]:
    """Return the annotations of a Service's template."""
    template = (obj.get("spec") or {}).get("template") or {}
    return (template.get("metadata") or {}).get("annotations") or {}


def scale_annotations(obj: Json) -> dict[str, str]:
    """Return the annotations of a Service's template that say how it is scaled."""
    return {name: value for name, value in template_annotations(obj).items() if name in SCALE}


def attempts_of(observed: Json) -> int:
    """Return how many Revisions were made for a Service's rendering."""
    return parse_whole_number(str(template_annotations(observed).get(ATTEMPT, ""))) or 1


def with_template_annotations(obj: Json, annotations: Mapping[str, str | None]) -> dict[str, Any]:
    """Return a copy of a Service with these annotations set in its template. None removes an annotation."""
    spec = obj.get("spec") or {}
    template = spec.get("template") or {}
    merged = {name: value for name, value in {**template_annotations(obj), **annotations}.items() if value is not None}
    metadata = {**(template.get("metadata") or {}), "annotations": merged}
    return {**obj, "spec": {**spec, "template": {**template, "metadata": metadata}}}


def hold_rendering(part: dict[str, Any], wanted: Json, initial_scale: str | None) -> dict[str, Any]:
    """Return a Service as it was last applied (`part`, see `owned_part`), with the wanted scale.

    If the scale is the same, `part` is returned as it is, with its stamp.
    """
    scale = scale_annotations(wanted)
    if scale_annotations(part) == scale:
        return part
    found = with_template_annotations(part, {**dict.fromkeys(SCALE), **scale, INITIAL_SCALE: initial_scale})
    metadata = found["metadata"]
    annotations = {name: value for name, value in (metadata.get("annotations") or {}).items() if name != APPLIED}
    return {**found, "metadata": {**metadata, "annotations": annotations}}


def keep_annotations(wanted: dict[str, Any], observed: Json, initial_scale: str | None) -> dict[str, Any]:
    """Return the wanted Service with the annotations that were chosen when its rendering was written.

    Other annotations would make Knative start another Revision. `initial_scale` counts only if the scale changes.
    """
    annotations, attempts = template_annotations(observed), attempts_of(observed)
    if scale_annotations(observed) == scale_annotations(wanted):
        initial_scale = "0" if annotations.get(INITIAL_SCALE) == "0" else None
    attempt = str(attempts) if attempts > 1 else None
    if initial_scale is None and attempt is None:
        return wanted
    return with_template_annotations(wanted, {INITIAL_SCALE: initial_scale, ATTEMPT: attempt})
