"""All targets by name, and their corpora: inputs that were findings once, kept in the repository."""

from pathlib import Path
from typing import Final

from tests.fuzz import artifacts, formats, messages, tokens
from tests.fuzz.oracle import FuzzTarget

CORPUS: Final = Path(__file__).parent / "corpus"
ALL: Final = (*formats.TARGETS, *messages.TARGETS, *artifacts.TARGETS, *tokens.TARGETS)
TARGETS: Final = {target.name: target for target in ALL}


def corpus_of(target: FuzzTarget) -> dict[str, bytes]:
    """Return the target's corpus by file name."""
    return {path.name: path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))}
