"""The age of the feed that is kept on disk goes by the wall clock. The clock is set by some hours while the control
plane is away and the door is restarted: the next process knows no key, and refuses everybody as long as that lasts.
"""

from activator.last_feed import LastFeed, _Kept
from tests.simulation.undone import Undoing

WORLD = "door"
SIGN = r"^the_next_process_knows_the_table"
SEED = 439_978_773_724


def _age_on_disk_s(self: LastFeed, kept: _Kept) -> float:
    return self._wall_s() - kept.heard_at_s


def undo(undoing: Undoing) -> None:
    undoing.method(LastFeed, "_age_on_disk_s", _age_on_disk_s)
