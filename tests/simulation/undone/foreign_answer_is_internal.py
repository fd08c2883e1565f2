"""A pod's runtime is gone and a proxy answers for it, in HTML: the caller is told of an internal error, though another
replica is ready.
"""

from activator.proxy import Declined, Lost, Upstream
from activator.upstream_http import Answer
from contracts.errors import Internal
from tests.simulation.undone import Undoing

WORLD = "door"
SIGN = r"^no_failure_is_internal"


def undo(undoing: Undoing) -> None:
    rejection = Upstream._rejection

    async def _rejection(self: Upstream, answer: Answer) -> Declined | Lost:
        if answer.fields.get(b"content-type", b"").startswith(b"text/") and answer.status != 503:
            return Declined(Internal())
        return await rejection(self, answer)

    undoing.method(Upstream, "_rejection", _rejection)
