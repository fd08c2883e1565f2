"""Fixtures that several test files share: a sealed version for pods, and a snapshotter for push commands."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kelvin.pods import sealed_version
from tests.runtime.processes import Installation
from tests.snapshotter.house import House, open_house, settings_for
from tests.weightcache.kit import Version


@pytest.fixture(scope="session")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Installation, Version]]:
    """A store with one sealed version. Each pod has a data directory of its own and doesn't change the store."""
    with sealed_version(tmp_path_factory.mktemp("store") / "data") as found:
        yield found


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A snapshotter installation with default settings. Some test files define their own."""
    with open_house(settings_for(tmp_path / "data")) as opened:
        yield opened
