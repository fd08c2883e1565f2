"""What Kubernetes' controllers do with a Deployment whose pods do not all get ready. Pure functions of numbers.

Follows kubernetes' pkg/controller/deployment (rolling.go, util/deployment_util.go) and pkg/controller/disruption
(disruption.go).
"""

import sys
from typing import Any, Final

Json = dict[str, Any]

EVERY: Final = sys.maxsize  # all pods get ready
_DEFAULT: Final = "25%"


def updated(replicas: int, strategy: Json, ready: int = EVERY) -> tuple[int, int]:
    """Return the old and new pods at the end of an update. At most `ready` pods are ready, old ones first, as a leader
    stays leader until it is ended.
    """
    if strategy.get("type") == "Recreate":
        return 0, replicas
    surge, least = _surge(replicas, strategy), least_available(replicas, strategy)
    old, new = replicas, 0
    while True:
        before = old, new
        old_ready = min(old, ready)
        new_ready = min(new, ready - old_ready)
        room = min(replicas + surge - old, replicas) - new
        if room > 0:
            new += room
        else:  # pods that aren't ready go first, then others while enough are ready
            old -= min(old - old_ready, max(0, old + new_ready - least))
            old -= min(old, max(0, old_ready + new_ready - least))
        if (old, new) == before:
            return before


def least_available(replicas: int, strategy: Json) -> int:
    """Return how many pods stay ready at any moment of an update in which all pods get ready."""
    if strategy.get("type") == "Recreate":
        return 0
    unavailable = _share(strategy.get("rollingUpdate", {}).get("maxUnavailable", _DEFAULT), replicas, up=False)
    if not unavailable and not _surge(replicas, strategy):
        unavailable = 1
    return max(0, replicas - unavailable)


def _surge(replicas: int, strategy: Json) -> int:
    return _share(strategy.get("rollingUpdate", {}).get("maxSurge", _DEFAULT), replicas, up=True)


def evictable(budget: Json, replicas: int, ready: int = EVERY) -> int:
    """Return how many ready pods a PodDisruptionBudget lets be evicted at once."""
    if "maxUnavailable" in budget:
        wanted = max(0, replicas - _share(budget["maxUnavailable"], replicas, up=True))
    else:
        wanted = _share(budget["minAvailable"], replicas, up=True)
    return max(0, min(replicas, ready) - wanted)


def _share(amount: int | str, whole: int, *, up: bool) -> int:
    """Return a number as it is, or a percentage of the whole."""
    if isinstance(amount, int):
        return amount
    parts = int(amount.removesuffix("%")) * whole
    return -(-parts // 100) if up else parts // 100
