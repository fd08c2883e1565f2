"""The end of updates and drains, with all pods ready and with only the leader ready."""

import pytest

from tests.manifests.controllers import EVERY, evictable, least_available, updated
from tests.manifests.kustomize_build import Json


def rolling(unavailable: int | str, surge: int | str) -> Json:
    return {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": unavailable, "maxSurge": surge}}


@pytest.mark.parametrize(
    ("replicas", "strategy", "ready", "want"),
    [
        pytest.param(2, rolling(0, 1), EVERY, (0, 2), id="one more at a time"),
        pytest.param(3, rolling(1, 0), EVERY, (0, 3), id="one less at a time"),
        pytest.param(4, {}, EVERY, (0, 4), id="Kubernetes' own quarter"),
        pytest.param(1, rolling("25%", "0%"), EVERY, (0, 1), id="percentages that round to zero: one less"),
        pytest.param(2, rolling(1, 1), 1, (1, 2), id="only the leader is ready, and it is kept"),
        pytest.param(3, rolling(1, 1), 1, (2, 2), id="of three the leader and a follower are kept"),
        pytest.param(3, rolling(2, 1), 1, (1, 3), id="one must be ready, and the leader is"),
        pytest.param(3, rolling("50%", 1), 1, (2, 2), id="a share that is unavailable is rounded down"),
        pytest.param(2, rolling("100%", 1), 1, (0, 2), id="of two none must be ready"),
        pytest.param(3, rolling("100%", 1), 1, (0, 3), id="of three none must be ready"),
        pytest.param(2, {"type": "Recreate"}, 1, (0, 2), id="first none, then all"),
    ],
)
def test_update_ends_at_no_old_pod(replicas: int, strategy: Json, ready: int, want: tuple[int, int]) -> None:
    """Old pods remain only if new pods wait to be ready."""
    assert updated(replicas, strategy, ready) == want


@pytest.mark.parametrize(
    ("budget", "replicas", "ready", "want"),
    [
        pytest.param({"maxUnavailable": 1}, 2, EVERY, 1, id="one of two may go"),
        pytest.param({"maxUnavailable": 1}, 2, 1, 0, id="not the leader: the other one is not ready"),
        pytest.param({"maxUnavailable": 1}, 3, 1, 0, id="not the leader of three"),
        pytest.param({"maxUnavailable": "50%"}, 3, 1, 0, id="two of three are not enough"),
        pytest.param({"maxUnavailable": "100%"}, 3, 1, 1, id="the leader may go"),
        pytest.param({"maxUnavailable": "50%"}, 3, EVERY, 2, id="a share that is unavailable is rounded up"),
        pytest.param({"minAvailable": 1}, 1, EVERY, 0, id="never the only one"),
        pytest.param({"minAvailable": "50%"}, 3, EVERY, 1, id="a share that is available is rounded up"),
    ],
)
def test_drain_takes_pods_beyond_the_budget(budget: Json, replicas: int, ready: int, want: int) -> None:
    """Ready pods beyond the budget's number may be evicted."""
    assert evictable(budget, replicas, ready) == want


@pytest.mark.parametrize(
    ("replicas", "strategy", "want"),
    [
        pytest.param(2, rolling(1, 1), 1, id="one less than there are"),
        pytest.param(2, rolling("100%", 1), 0, id="none must be ready"),
        pytest.param(3, rolling(0, 0), 2, id="zero and zero: one less"),
        pytest.param(4, {}, 3, id="Kubernetes' own quarter"),
        pytest.param(2, {"type": "Recreate"}, 0, id="first none, then all"),
    ],
)
def test_least_available_during_an_update(replicas: int, strategy: Json, want: int) -> None:
    assert least_available(replicas, strategy) == want
