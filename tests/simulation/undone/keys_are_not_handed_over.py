"""At a restart two processes serve from one socket, and the new one knows no idempotency key of the old one: a request
that is sent again runs a second time.
"""

from activator.answers_handover import HandoverReceiver
from activator.kept_answers import OwnAnswers
from service.unix import SocketDirectory
from tests.simulation.undone import Undoing

WORLD = "door"
SIGN = r"^a_key_runs_once"


async def _connect(answers: OwnAnswers, directory: SocketDirectory) -> None:
    return None


def undo(undoing: Undoing) -> None:
    undoing.method(HandoverReceiver, "connect", staticmethod(_connect))
