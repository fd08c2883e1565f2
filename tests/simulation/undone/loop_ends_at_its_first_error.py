"""A background loop of the control plane ends at its first unexpected error: after one error of the database budgets
are never told again.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from controlplane.tasks import Tasks
from tests.simulation.undone import Undoing

WORLD = "machine"
SIGN = r"^loops_live"


def _start_loop(self: Tasks, name: str, body: Callable[[], Coroutine[Any, Any, None]], **_: object) -> None:
    self.start(body(), name)


def undo(undoing: Undoing) -> None:
    undoing.method(Tasks, "start_loop", _start_loop)
