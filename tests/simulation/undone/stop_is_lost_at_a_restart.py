"""That an operator stopped a version is kept in memory only: after a restart its minimum starts it again."""

from sqlalchemy import Connection

from controlplane.facts import Model
from controlplane.registry_rows import set_stops
from tests.simulation.undone import Undoing

WORLD = "machine"
SIGN = r"^a_restart_forgets_nothing"


def _set_stops(connection: Connection, before: Model, model: Model) -> None:
    return


def undo(undoing: Undoing) -> None:
    undoing.function(set_stops, _set_stops)
