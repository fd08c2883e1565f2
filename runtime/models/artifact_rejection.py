"""Refuse an artifact, in words that its owner may see."""

from typing import Final

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused

MAX_CHARACTERS: Final = 400  # of a name or reason; a value in a config may be a megabyte long


def artifact_rejected(path: str, reason: str) -> Refused:
    """Return a refusal with a file or tensor and the reason."""
    return Refused(ArtifactRejected(path[:MAX_CHARACTERS], reason[:MAX_CHARACTERS]))


def public_message(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
