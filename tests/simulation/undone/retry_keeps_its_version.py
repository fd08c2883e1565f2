"""A request that is sent again goes to the version that it was first resolved to, which may have been deleted since:
it waits for it until its deadline.
"""

from activator.attempts import Attempts
from tests.simulation.undone import Undoing

WORLD = "door"
SIGN = r"^nobody_waits_for_what_is_deleted"
SEED = 1_080_140_984_881


def undo(undoing: Undoing) -> None:
    serve = Attempts.serve

    async def _serve(self: Attempts, *given: object) -> None:
        await serve(self, *given[:-1], lambda: True)  # type: ignore[arg-type,call-arg]

    undoing.method(Attempts, "serve", _serve)
