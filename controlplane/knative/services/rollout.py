"""Choose the wanted state of each version's Service while a new rendering is rolled out in waves.

`policy/rollout_waves.py` decides which Services are next. `applier.py` writes them.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from controlplane.clock import Clock
from controlplane.knative.apply.cluster import Denied, Invalid, Json, Missing, Ref
from controlplane.knative.policy.apply_steps import Refusal, is_foreign, owned_part
from controlplane.knative.policy.knative_service import AUTOSCALING, ZERO_INITIAL_SCALE
from controlplane.knative.policy.object_labels import ATTEMPT, NamespacedName
from controlplane.knative.policy.object_status import RevisionFailure, describe_reason
from controlplane.knative.policy.rollout_waves import (
    INITIAL_SCALE,
    OUTDATED,
    ImageBehind,
    RolloutStage,
    ServiceRollout,
    admit_next_wave,
    hold_rendering,
    keep_annotations,
    parse_service_rollout,
    rendering_of,
    scale_annotations,
    template_annotations,
    with_template_annotations,
)
from controlplane.knative.services.pods import PodTable
from controlplane.registry.policy.domain import VersionKey
from kelvin.process.loops import record_error

log = logging.getLogger(__name__)

_LASTING_REASONS: Final = {each.reason for each in (Denied, Invalid, Missing)}  # other refusals may pass by themselves


class Rollout:
    """The roll-out under one leader; `chosen` is the result. Call `set_rendered` after every change of the wanted
    Services, and `choose` often: each call reads only Services that changed.

    Only the writes in progress, and since when each version is behind, are kept here. The next leader reads the rest
    from the cluster's objects.
    """

    def __init__(
        self,
        find_observed: Callable[[Ref], Json | None],
        find_failure: Callable[[NamespacedName], RevisionFailure | None],
        pods: PodTable,
        clock: Clock,
        installation: str,
        features: frozenset[str],
    ) -> None:
        """`find_observed` returns a Service as it is now, `find_failure` why a Revision failed."""
        self._find_observed = find_observed
        self._find_failure = find_failure
        self._pods = pods
        self._clock = clock
        self._installation = installation
        self._allows_zero = ZERO_INITIAL_SCALE in features
        self._rendered: dict[Ref, tuple[VersionKey, Json]] = {}
        self._entries: dict[Ref, _Entry] = {}
        self._held_services: dict[Ref, Json] = {}  # waiting Services, in their state until their turn
        self._admitted: dict[Ref, Json] = {}  # Services whose turn has come
        self._last_explained: tuple[bool, bool] | None = None  # (is proven, has failures); None: explain again
        self.chosen: dict[Ref, Json] = {}
        self.images_behind: dict[VersionKey, ImageBehind] = {}
        self.is_moving = False  # some version's turn has come: call `choose` again soon

    def __repr__(self) -> str:
        return f"<Rollout behind={len(self.images_behind)} writing={len(self._admitted)}>"

    def set_rendered(self, rendered: Iterable[Json], key_by_service: Mapping[NamespacedName, VersionKey]) -> None:
        """Replace all rendered Services. Call `choose` next."""
        found = {Ref.of(obj): obj for obj in rendered}
        self._rendered = {ref: (key_by_service[ref.namespaced_name], obj) for ref, obj in found.items()}
        for table in (self._entries, self._held_services, self._admitted, self.chosen):
            for ref in table.keys() - found.keys():
                del table[ref]
        self._last_explained = None

    def choose(self, refusals: Mapping[Ref, Refusal]) -> bool:
        """Update `chosen` and `images_behind`. Return whether some Service was chosen again."""
        now_s = self._clock.wall_s()
        changed = self._read_changed(refusals, now_s)
        entries = {**self._entries, **changed}
        self._drop_finished(changed)
        every = [entry.service_rollout for entry in entries.values() if entry.service_rollout is not None]
        admitted, is_proven = admit_next_wave(every, now_s)
        due = {ref for ref in self._rendered if ref.namespaced_name in admitted} if admitted else set[Ref]()
        for ref in dict.fromkeys((*changed, *due)):
            self.chosen[ref] = self._choose(ref, entries[ref], ref in due, is_proven)
        explained = (is_proven, any(each.is_failure for each in every))
        has_failed = any(each.stage is RolloutStage.FAILED for each in every)  # its Revision may show why later
        if changed or due or has_failed or explained != self._last_explained:
            self._explain(entries, *explained, int(now_s))
            self._last_explained = explained
        self._entries = entries  # last: after an error, the next call reads and chooses all of these again
        self.is_moving = bool(admitted) or any(each.reason == "starting" for each in self.images_behind.values())
        return bool(changed or due)

    def _read_changed(self, refusals: Mapping[Ref, Refusal], now_s: float) -> "dict[Ref, _Entry]":
        """Read the facts of Services that changed since the last call, and return them."""
        with_pods = frozenset(self._pods.active_versions())
        changed: dict[Ref, _Entry] = {}
        for ref, (key, obj) in self._rendered.items():
            sources = _Sources(
                obj, self._find_observed(ref), key in with_pods, ref in self._admitted, refusals.get(ref)
            )
            before = self._entries.get(ref)
            if before is not None and before.sources == sources:
                continue
            try:
                service_rollout = self._read_service_rollout(
                    sources, None if before is None else before.service_rollout, now_s
                )
                changed[ref] = _Entry(key, sources, service_rollout)
            except Exception as error:  # one Service that can't be read must not stop the roll-out of the others
                record_error(error, ref)
                changed[ref] = _Entry(key, sources, None, is_readable=False)
        return changed

    def _read_service_rollout(
        self, sources: "_Sources", before: ServiceRollout | None, now_s: float
    ) -> ServiceRollout | None:
        obj, observed, has_pods, is_admitted, refusal = sources
        if observed is None or not self._is_ours(observed):
            return None
        owned_part(observed)  # read here, so that an error affects only this Service
        refused_at_s = None
        if is_admitted and refusal is not None and refusal.reason in _LASTING_REASONS:
            refused_at_s = now_s if before is None or before.stage is not RolloutStage.REFUSED else before.failed_at_s
        is_idle = template_annotations(obj).get(f"{AUTOSCALING}/min-scale") == "0" and not has_pods
        return parse_service_rollout(
            obj, observed, is_awake=not is_idle, is_admitted=is_admitted, refused_at_s=refused_at_s, now_s=now_s
        )

    def _is_ours(self, observed: Json) -> bool:
        return not is_foreign(observed, self._installation) and "deletionTimestamp" not in observed["metadata"]

    def _drop_finished(self, changed: "Mapping[Ref, _Entry]") -> None:
        for ref in self._admitted.keys() & changed.keys():
            entry = changed[ref]
            is_done = entry.service_rollout is None or entry.service_rollout.stage not in (
                *OUTDATED,
                RolloutStage.STARTING,
            )
            if is_done or rendering_of(self._admitted[ref]) != rendering_of(entry.sources.rendered):
                del self._admitted[ref]

    def _choose(self, ref: Ref, entry: "_Entry", is_due: bool, is_proven: bool) -> Json:
        obj, observed, service_rollout = entry.sources.rendered, entry.sources.observed, entry.service_rollout
        if service_rollout is None or service_rollout.stage not in OUTDATED:
            self._held_services.pop(ref, None)
        if not entry.is_readable and observed is not None:
            return unchanged_service(observed)
        if service_rollout is None or observed is None:
            return obj
        # A Revision without a pod is ready at once. So allow it only for a version that has proven that it starts.
        zero = "0" if self._allows_zero and not service_rollout.is_awake and service_rollout.is_sound else None
        if service_rollout.stage in OUTDATED:
            before = self._admitted.get(ref)
            if before is not None and scale_annotations(before) == scale_annotations(obj):
                return before
            if is_due or before is not None:
                self._admitted[ref] = with_template_annotations(obj, {INITIAL_SCALE: zero if is_proven else None})
                return self._admitted[ref]
            self._held_services[ref] = hold_rendering(self._held_services.get(ref) or owned_part(observed), obj, zero)
            return self._held_services[ref]
        if is_due:
            self._admitted[ref] = with_template_annotations(obj, {ATTEMPT: str(service_rollout.attempts + 1)})
            return self._admitted[ref]
        return keep_annotations(obj, observed, zero)

    def _explain(self, entries: "Mapping[Ref, _Entry]", is_proven: bool, has_failed: bool, now_s: int) -> None:
        behind: dict[VersionKey, ImageBehind] = {}
        for ref, entry in entries.items():
            why = self._explain_delay(entry, ref in self._admitted, is_proven, has_failed)
            if why is None:
                continue
            known = self.images_behind.get(entry.key)
            if known is not None and (known.reason, known.message) == why:
                behind[entry.key] = known
                continue
            behind[entry.key] = ImageBehind(
                reason=why[0], message=why[1], since_s=now_s if known is None else known.since_s
            )
            if why[0] in ("failed", "refused") and (known is None or known.reason != why[0]):
                log.warning("a version keeps its previous image", extra={"version": str(entry.key), "why": why[1]})
        self.images_behind = behind

    def _explain_delay(
        self, entry: "_Entry", is_written: bool, is_proven: bool, has_failed: bool
    ) -> tuple[str, str] | None:
        """Return reason and sentence why a version is behind; None if it is not. Its tenant reads it, so it names no
        other tenant.
        """
        service_rollout, observed, refusal = entry.service_rollout, entry.sources.observed, entry.sources.refusal
        if not entry.is_readable:
            return "unreadable", "its Service in the cluster can't be read; it stays as it is"
        if service_rollout is None or observed is None:
            return None
        if service_rollout.stage is RolloutStage.FAILED:
            created = str((observed.get("status") or {}).get("latestCreatedRevisionName") or "")
            failed = self._find_failure((service_rollout.object_name[0], created))
            what = describe_reason("" if failed is None else failed.reason)
            return "failed", f"its new revision did not start: {what}; the previous one serves"
        if service_rollout.stage is RolloutStage.STARTING and is_written and service_rollout.was_ready:
            return "starting", "its new revision is starting; the previous one serves"
        if service_rollout.stage is RolloutStage.REFUSED:
            is_zero = refusal is not None and "initial-scale=0 not allowed" in refusal.message
            rule = f": Knative's config-autoscaler needs {ZERO_INITIAL_SCALE}" if is_zero else ""
            return "refused", f"the cluster does not take its new Service{rule}"
        if service_rollout.stage is RolloutStage.WRITING:
            return "starting", "its new Service is being written"
        if service_rollout.stage is not RolloutStage.WAITING:
            return None
        if has_failed:
            return "waiting", "it waits: the new image did not start for another version, and is tried again later"
        if not is_proven:
            return "waiting", "it waits until a first replica with the new image is ready"
        return "waiting", "it waits for its turn"


class _Sources(NamedTuple):
    """The inputs from which a Service's facts are read."""

    rendered: Json
    observed: Json | None  # as the cluster has it
    has_pods: bool
    is_admitted: bool  # its turn has come
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class _Entry:
    """The facts of a version's Service. If the cluster has no Service of ours there, `service_rollout` is None, and the
    Service is written as rendered.
    """

    key: VersionKey
    sources: _Sources
    service_rollout: ServiceRollout | None
    is_readable: bool = True


def unchanged_service(observed: Json) -> Json:
    """Return a wanted state with which the cluster keeps the Service as it is."""
    try:
        return owned_part(observed)
    except Exception:  # `managedFields` can't be read; the whole object as wanted state differs in nothing
        return dict(observed)
