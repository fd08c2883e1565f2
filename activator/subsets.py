"""Which replicas of a version are this activator's to prefer, as activators and replicas come and go."""

from collections.abc import Set
from dataclasses import dataclass
from math import inf

from activator.line import Line
from activator.policy.places import RENEW_S
from activator.policy.subsets import preferred, uses_all


@dataclass(slots=True)
class Subset:
    """Of one version."""

    has_others: bool = False  # replicas that are not preferred
    _is_busy: bool = False
    _judged_s: float = -inf
    _of: tuple[tuple[str, ...], dict[str, int], bool] | None = None

    def choose(self, line: Line, doors: tuple[str, ...], me: str, now_s: float) -> None:
        """Tell its replicas, where anything has changed."""
        slots = {name: each.row.max_streams for name, each in line.replicas.items() if not each.row.draining}
        if now_s - self._judged_s >= RENEW_S:
            self._judged_s, self._is_busy = now_s, uses_all(line.most, len(slots))
            line.most = line.pace.running
        of = (doors, slots, self._is_busy)
        if of == self._of:
            return
        self._of = of
        near: Set[str] = (
            slots.keys() if self._is_busy or not slots else preferred(doors, slots, me, min(slots.values()))
        )
        for name, replica in line.replicas.items():
            replica.is_preferred = name in near
        self.has_others = len(near) < len(slots)
