"""What the tests of pods share."""

from collections.abc import Iterator

import pytest

from tests.kelvin.pods import sealed_version
from tests.runtime.processes import Installation
from tests.weightcache.kit import Version


@pytest.fixture(scope="session")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Installation, Version]]:
    """A store with a sealed version. Pods have directories of their own, and change nothing of it."""
    with sealed_version(tmp_path_factory.mktemp("store") / "data") as found:
        yield found
