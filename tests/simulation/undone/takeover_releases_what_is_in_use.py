"""A control plane that takes over takes silence for idleness: it drains replicas that callers use."""

from controlplane.facts import Model
from controlplane.takeover import Takeover
from tests.simulation.undone import Undoing

WORLD = "machine"
SIGN = r"^what_is_in_use_goes_on"


def _known(self: Takeover, model: Model, now: float) -> bool:
    return True


def undo(undoing: Undoing) -> None:
    undoing.method(Takeover, "is_known", _known)
    undoing.method(Takeover, "is_window_over", _known)
