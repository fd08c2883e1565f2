"""The journal is written before COMMIT, and a restore replays also what was never committed: a month is restored as
closed that was never closed, with another bill.
"""

from controlplane.journal import LedgerJournal
from tests.simulation.undone import Undoing

WORLD = "ledger"
SIGN = r"^a_restored_ledger_is_the_same: (closing|request|lifetime|can.t be restored)"
SEED = 624_672_957_957


def _drop_after(self: LedgerJournal, position: int) -> None:
    return


def undo(undoing: Undoing) -> None:
    undoing.method(LedgerJournal, "drop_after", _drop_after)
