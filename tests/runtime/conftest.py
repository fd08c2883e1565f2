"""One installation of real processes for all tests that need it: its zygote takes seconds to import everything."""

from collections.abc import Iterator

import pytest

from tests.runtime.processes import Installation, installation


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A running zygote and cache agent."""
    with installation(tmp_path_factory.mktemp("house") / "data") as each:
        yield each
