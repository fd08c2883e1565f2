"""Has weights brought into host memory shortly before they are expected to be asked for. Best effort, for nobody yet.

When a version is expected is `policy/recurrence`'s to say, by the pauses that the autoscaler keeps; whether there is
room for it that nobody needs more is the weight cache's.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from controlplane.clock import Clock
from controlplane.facts import Model, Version, VersionKey
from controlplane.policy.breakeven import Gaps
from controlplane.policy.recurrence import Allowance, Counts, Expected, Unexpected, Watch, lead_s, worth

log = logging.getLogger(__name__)

BEAT_S: Final = 1.0


class Versions(Protocol):
    """What is known of versions, from memory."""

    def find(self, key: VersionKey) -> tuple[Model, Version] | None: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """What is expected of one version. `view` is None where it is in use, or never was."""

    view: Expected | Unexpected | None
    is_brought: bool
    counts: Counts


class Foresight:
    """One per installation. `least_s` 0: nothing is ever expected."""

    def __init__(
        self,
        versions: Versions,
        gaps: Gaps[VersionKey],
        live: Callable[[VersionKey], int],
        restore_s: Callable[[VersionKey, int], float],
        bring: Callable[[VersionKey, float], None],
        clock: Clock,
        *,
        least_s: float,
        bytes_per_s: float,
    ) -> None:
        """`live` counts replicas that serve or are about to; `restore_s` says what a start of so many bytes takes;
        `bring` asks for a version at that worth.
        """
        self._versions = versions
        self._gaps = gaps
        self._live = live
        self._restore_s = restore_s
        self._bring = bring
        self._clock = clock
        self.least_s = least_s
        self._allowance = Allowance(bytes_per_s)
        self._watches: dict[VersionKey, Watch] = {}

    def __repr__(self) -> str:
        return f"<Foresight versions={len(self._watches)}>"

    def of(self, key: VersionKey) -> Seen:
        """What is expected of it."""
        watch = self._watches.get(key)
        return Seen(None, False, Counts()) if watch is None else Seen(watch.view, watch.is_brought, watch.counts)

    async def run(self) -> None:
        """Look for ever; where nothing is to be foreseen, at nothing."""
        while self.least_s:
            await self._clock.sleep(BEAT_S)
            self.look()

    def look(self) -> None:
        """Once, at every version that was used lately."""
        now = self._clock.monotonic_us() / 1e6
        known = dict(self._gaps.last_busy())
        self._watches = {key: watch for key, watch in self._watches.items() if key in known}
        for key, busy_s in known.items():
            found = self._versions.find(key)
            if found is None:
                continue
            watch = self._watches.setdefault(key, Watch(self.least_s))
            total = found[1].registration.total_bytes
            due = watch.look(self._gaps.of(key), busy_s, now, lead_s(self._restore_s(key, total)))
            if due is None or self._live(key) or not self._allowance.try_take(total, now):
                continue
            watch.brought()
            value = worth(due, watch.counts)
            self._bring(key, value)
            seen = {"version": str(key), "opens_s": due.opens_s, "closes_s": due.closes_s, "worth": value}
            log.info("a version is expected", extra=seen)
