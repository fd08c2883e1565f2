"""Fixtures that several test files use: a sealed version for pods, a house for commands that push."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kelvin.pods import sealed_version
from tests.runtime.processes import Installation
from tests.snapshotter.house import House, open_house, settings_for
from tests.weightcache.kit import Version


@pytest.fixture(scope="session")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Installation, Version]]:
    """A store with a sealed version. Pods have directories of their own, and change nothing of it."""
    with sealed_version(tmp_path_factory.mktemp("store") / "data") as found:
        yield found


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A house with default settings. Some test files have one of their own."""
    with open_house(settings_for(tmp_path / "data")) as opened:
        yield opened
