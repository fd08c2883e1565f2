"""A sum that comes back to zero from below keeps its row: a sound ledger is called unsound, and closings and restores
are refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from controlplane.totals import _Adding
from tests.simulation.undone import Undoing

WORLD = "ledger"
SIGN = r"not sound: total of day|total of day"
SEED = 1_065_259_851_405


def _run(self: _Adding, connection: Connection, sums: Mapping[tuple[Any, ...], Sequence[Any]]) -> None:
    if not sums:
        return
    rows = [dict(zip(self._columns, (*name, *figures), strict=True)) for name, figures in sums.items()]
    connection.execute(self._statements[connection.dialect.name], rows)
    named = [f"of_{name}" for name in self._names]
    if less := [name for name, figures in sums.items() if min(map(_figure, figures)) < 0]:
        connection.execute(self._sweep, [dict(zip(named, name, strict=True)) for name in less])


def _figure(value: object) -> int:
    return value if isinstance(value, int) else 0


def undo(undoing: Undoing) -> None:
    undoing.method(_Adding, "run", _run)
