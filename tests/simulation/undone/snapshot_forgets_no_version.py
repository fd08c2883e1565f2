"""A version is deleted while the feed is away. The snapshot that follows does not name it, and nobody tells those who
wait for it: they wait until their deadlines.
"""

import msgspec

from activator.keys import VersionKey
from activator.roster import Roster
from contracts.control import Feed, VersionRow
from contracts.manifest import Limits
from tests.simulation.undone import Undoing

WORLD = "door"
SIGN = r"^nobody_waits_for_what_is_deleted"
SEED = 497_665_188_860


def undo(undoing: Undoing) -> None:
    apply = Roster.apply

    def _apply(self: Roster, feed: Feed) -> None:
        if feed.full:  # as if each version that is waited for were in the snapshot
            known = tuple(map(_row, self._lines))
            feed = msgspec.structs.replace(feed, versions=(*feed.versions, *known))
        apply(self, feed)

    undoing.method(Roster, "apply", _apply)


def _row(key: VersionKey) -> VersionRow:
    return VersionRow(
        tenant=key.tenant, model=key.model, version=key.version, limits=Limits(1, 1, 1, 1), created_at_s=0
    )
