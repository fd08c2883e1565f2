"""That a tenant is suspended is not asked when replicas are decided on: its minimum starts its model again, and it is
billed.
"""

from controlplane.feed import FeedHub
from tests.simulation.undone import Undoing

WORLD = "machine"
SIGN = r"^nothing_runs_of_suspended_tenants"
SEED = 912_217_151_930


def _is_suspended(self: FeedHub, tenant: str) -> bool:
    return False


def undo(undoing: Undoing) -> None:
    undoing.method(FeedHub, "is_suspended", _is_suspended)
