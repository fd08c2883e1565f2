"""A reservation that is refused after its places were taken leaves its chunks loading for ever: other versions that
share them get internal errors.
"""

from tests.simulation.undone import Undoing
from weightcache.arena import Arena
from weightcache.policy.host import Reservation

WORLD = "cache"
SIGN = r"^the_indexes_are_sound"


def _withdraw(self: Arena, reservation: Reservation) -> None:
    self.unpin(reservation.slabs)


def undo(undoing: Undoing) -> None:
    undoing.method(Arena, "withdraw", _withdraw)
