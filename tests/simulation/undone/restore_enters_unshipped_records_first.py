"""A record lay in a spool when the backup was made, and came after its month was closed. The restore enters it before
the closing: the closed bill is not what the rows make, and nothing can be restored.
"""

from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import Engine

from controlplane import restore
from controlplane.backups import UNSHIPPED
from controlplane.journal import Entry
from controlplane.restore import replay
from tests.simulation.undone import Undoing

WORLD = "ledger"
SIGN = r"^a_restored_ledger_is_the_same: can't be restored: .* closed bill's"
SEED = 644_063_370_884


def _replay(engine: Engine, entries: Iterable[Entry]) -> int:
    directory = Path(str(engine.url.database)).parent
    return replay(engine, [*restore._unshipped(directory / UNSHIPPED, 0), *entries])


def undo(undoing: Undoing) -> None:
    undoing.name(restore, "replay", _replay)
