"""How a decoder is examined, and how its known answers are recorded."""

from typing import Final

from contracts.artifact_errors import ProbeFailed
from contracts.errors import Refused
from contracts.jobs import Probe
from runtime import probe as known_answers
from runtime.binding import BoundModel
from runtime.gate import examine
from runtime.pinned import PinnedFiles
from runtime.weights import Ways


def record(bound: BoundModel, files: PinnedFiles, version: str) -> Probe:
    """By the library's own attention. Raises `Refused(ProbeFailed)` where it has no finite answer."""
    try:
        return known_answers.record(bound)
    except ValueError as error:
        raise Refused(ProbeFailed(version, str(error))) from error


WAYS: Final = Ways(examine, record)
