"""A minimum holds for versions that no name leads to any more: after a deploy on a full machine the old version keeps
the device slot, and the new one does not start.
"""

from controlplane import minimums
from controlplane.facts import Model, Version
from tests.simulation.undone import Undoing

WORLD = "machine"
SIGN = r"^minimums_(hold|are_kept)"
SEED = 502_384_864_494


def _holds(model: Model, version: Version) -> bool:
    return version.stopped_at_s is None and not version.is_deleted


def undo(undoing: Undoing) -> None:
    undoing.name(minimums, "_holds", _holds)
