"""Wanting more replicas than there are device slots is told as a restore that failed, every two seconds, and takes the
place of the last real one.
"""

from contracts.traffic_errors import Overloaded
from controlplane.facts import VersionKey
from controlplane.scaling.local import LocalActuator
from tests.simulation.undone import Undoing

WORLD = "machine"
SIGN = r"^a_full_machine_is_no_failed_restore"


def undo(undoing: Undoing) -> None:
    begin = LocalActuator._begin

    def _begin(self: LocalActuator, key: VersionKey, asked_us: int) -> bool:
        if not begin(self, key, asked_us):
            self.fail(key, Overloaded("this machine", self.slots, 1.0))
            return False
        return True

    undoing.method(LocalActuator, "_begin", _begin)
