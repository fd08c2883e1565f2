"""Choose what is wanted of each version's Service while a new rendering is rolled out in waves. Whose turn it is
`policy/rollout.py` decides; `converge.py` writes the Services.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from controlplane.clock import Clock
from controlplane.facts import VersionKey
from controlplane.policy.convergence import Refusal, owned_part, owner_of
from controlplane.policy.knative_seen import Failed, sentence
from controlplane.policy.knative_service import AUTOSCALING, ZERO_INITIAL_SCALE
from controlplane.policy.labels import ATTEMPT, Place
from controlplane.policy.rollout import (
    INITIAL_SCALE,
    Behind,
    Rolling,
    Stage,
    admit,
    held_back,
    kept,
    notes_of,
    rendering_of,
    rolling_of,
    scale_of,
    with_notes,
)
from controlplane.scaling.knative.cluster import Denied, Invalid, Json, Missing, Ref
from controlplane.scaling.knative.following import place_of
from controlplane.scaling.knative.pods import PodTable

log = logging.getLogger(__name__)

_LASTING: Final = {each.reason for each in (Denied, Invalid, Missing)}  # others pass by themselves


class Rollout:
    """One for as long as this process leads. It remembers what is being written, and since when it knows of a version
    that it is behind; the rest is read from the cluster's objects.
    """

    def __init__(
        self,
        seen: Callable[[Ref], Json | None],
        failed: Callable[[Place], Failed | None],
        pods: PodTable,
        clock: Clock,
        installation: str,
        features: frozenset[str],
    ) -> None:
        """`seen` gives a Service as it is now, `failed` why a Revision failed."""
        self._seen = seen
        self._failed = failed
        self._pods = pods
        self._clock = clock
        self._installation = installation
        self._allows_zero = ZERO_INITIAL_SCALE in features
        self._held: dict[Ref, Json] = {}  # as they are kept until it is their turn
        self._writes: dict[Ref, Json] = {}  # of those whose turn it is
        self._refused_at_s: dict[Ref, float] = {}
        self._since_s: dict[VersionKey, int] = {}
        self.behind: dict[VersionKey, Behind] = {}
        self.is_moving = False  # it is some version's turn: look again soon

    def __repr__(self) -> str:
        return f"<Rollout behind={len(self.behind)} writing={len(self._writes)}>"

    def wanted(
        self, rendered: Iterable[Json], places: Mapping[Place, VersionKey], refusals: Mapping[Ref, Refusal]
    ) -> list[Json]:
        """Return the Services that the cluster is to have now, for all that were rendered."""
        now_s = self._clock.wall_s()
        found: list[Json] = []
        entries: dict[Ref, _Entry] = {}
        for obj in rendered:
            ref = Ref.of(obj)
            seen = self._seen(ref)
            if seen is None or not self._is_ours(seen):
                found.append(obj)
            else:
                entries[ref] = self._entry(ref, obj, seen, places[place_of(ref)], refusals.get(ref), now_s)
        self._forget(entries)
        turns, is_proven = admit((each.rolling for each in entries.values()), now_s)
        found += (self._choose(ref, each, place_of(ref) in turns, is_proven) for ref, each in entries.items())
        self._explain(entries, is_proven, int(now_s))
        self.is_moving = bool(turns) or any(each.reason == "starting" for each in self.behind.values())
        return found

    def _is_ours(self, seen: Json) -> bool:
        return owner_of(seen) in (None, self._installation) and "deletionTimestamp" not in seen["metadata"]

    def _entry(
        self, ref: Ref, obj: Json, seen: Json, key: VersionKey, refusal: Refusal | None, now_s: float
    ) -> "_Entry":
        is_admitted = ref in self._writes
        if is_admitted and refusal is not None and refusal.reason in _LASTING:
            self._refused_at_s.setdefault(ref, now_s)
        else:
            self._refused_at_s.pop(ref, None)
        is_idle = notes_of(obj).get(f"{AUTOSCALING}/min-scale") == "0" and not self._pods.of(key)
        rolling = rolling_of(
            obj, seen, is_awake=not is_idle, is_admitted=is_admitted, refused_at_s=self._refused_at_s.get(ref),
            now_s=now_s,
        )  # fmt: skip
        return _Entry(key, obj, seen, rolling, refusal)

    def _forget(self, entries: Mapping[Ref, "_Entry"]) -> None:
        """Drop what was written, and what is not wanted any more."""
        for ref in tuple(self._held):
            if ref not in entries or entries[ref].rolling.stage is not Stage.BEHIND:
                del self._held[ref]
        for ref, written in tuple(self._writes.items()):
            each = entries.get(ref)
            is_due = each is not None and each.rolling.stage in (Stage.BEHIND, Stage.STARTING)
            if each is None or not is_due or rendering_of(written) != rendering_of(each.obj):
                del self._writes[ref]
                self._refused_at_s.pop(ref, None)

    def _choose(self, ref: Ref, entry: "_Entry", is_turn: bool, is_proven: bool) -> Json:
        obj, rolling = entry.obj, entry.rolling
        # A Revision without a pod is ready at once: only for a version that has shown before that it starts.
        is_zero = self._allows_zero and not rolling.is_awake and rolling.is_sound and rolling.newest is Stage.READY
        zero = "0" if is_zero else None
        if rolling.stage is Stage.BEHIND:
            before = self._writes.get(ref)
            if before is not None and scale_of(before) == scale_of(obj):
                return before
            if is_turn or before is not None:
                self._writes[ref] = with_notes(obj, {INITIAL_SCALE: zero if is_proven else None})
                return self._writes[ref]
            self._held[ref] = held_back(self._held.get(ref) or owned_part(entry.seen), obj, zero)
            return self._held[ref]
        if rolling.stage is Stage.FAILED and is_turn:
            self._writes[ref] = with_notes(obj, {ATTEMPT: str(rolling.attempts + 1)})
            return self._writes[ref]
        return kept(obj, entry.seen, zero)

    def _explain(self, entries: Mapping[Ref, "_Entry"], is_proven: bool, now_s: int) -> None:
        has_failed = any(each.rolling.is_failure for each in entries.values())
        behind: dict[VersionKey, Behind] = {}
        for entry in entries.values():
            if (why := self._why(entry, is_proven, has_failed)) is None:
                continue
            behind[entry.key] = Behind(*why, self._since_s.setdefault(entry.key, now_s))
            known = self.behind.get(entry.key)
            if why[0] in ("failed", "refused") and (known is None or known.reason != why[0]):
                log.warning("a version keeps its image of before", extra={"version": str(entry.key), "why": why[1]})
        for key in self._since_s.keys() - behind.keys():
            del self._since_s[key]
        self.behind = behind

    def _why(self, entry: "_Entry", is_proven: bool, has_failed: bool) -> tuple[str, str] | None:
        """Return reason and sentence, for the version's tenant: no other's is named."""
        rolling = entry.rolling
        if rolling.stage is Stage.FAILED and rolling.is_failure:
            created = (entry.seen.get("status") or {}).get("latestCreatedRevisionName") or ""
            failed = self._failed((rolling.place[0], created))
            what = sentence("" if failed is None else failed.reason)
            return "failed", f"its new revision did not start: {what}; the one of before serves"
        if rolling.stage is Stage.STARTING and rolling.is_admitted and rolling.has_older:
            return "starting", "its new revision is starting; the one of before serves"
        if rolling.stage is not Stage.BEHIND:
            return None
        if rolling.failed_at_s is not None:
            is_zero = entry.refusal is not None and "initial-scale=0 not allowed" in entry.refusal.message
            rule = f": Knative's config-autoscaler needs {ZERO_INITIAL_SCALE}" if is_zero else ""
            return "refused", f"the cluster does not take its new Service{rule}"
        if rolling.is_admitted:
            return "starting", "its new Service is being written"
        if has_failed:
            return "waiting", "it waits: the new image did not start for another version, and is tried again later"
        if not is_proven:
            return "waiting", "it waits until a first replica with the new image is ready"
        return "waiting", "it waits for its turn"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A version's Service: what is rendered of it now, and what the cluster has."""

    key: VersionKey
    obj: Json
    seen: Json
    rolling: Rolling
    refusal: Refusal | None
