"""A scratch directory with a short path, as a user would have, and a tiny model."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.tiny_models import make_tiny


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A directory for the whole session."""
    with tempfile.TemporaryDirectory(prefix="kelvin-attack-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def tiny(scratch: Path) -> Path:
    """A model of a few hundred kilobytes."""
    return make_tiny(scratch / "tiny", "llama")
