"""Making room for a version that is asked for takes replicas below their version's minimum, which takes them back at
once, and so on without an end.
"""

from collections.abc import Iterable
from dataclasses import replace

from controlplane.facts import VersionKey
from controlplane.policy.reclaim import Holder, choose
from tests.simulation.undone import Undoing

WORLD = "machine"
SIGN = r"^(minimums_|what_is_in_use)"
SEED = 632_955_920_026


def _choose(holders: Iterable[Holder[VersionKey]], now: float) -> VersionKey | None:
    return choose((replace(holder, least=0) for holder in holders), now)


def undo(undoing: Undoing) -> None:
    undoing.function(choose, _choose)
