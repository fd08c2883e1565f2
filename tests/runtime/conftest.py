"""One installation of real processes for all tests, because its zygote takes seconds to import everything."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.runtime.processes import Installation, run_installation

if TYPE_CHECKING:
    from tests.runtime.versions import MemoryLease


@pytest.fixture(scope="session")
def sealed() -> "MemoryLease":
    """A tiny version with its attestation, in this process's memory."""
    from tests.runtime.restoring import VERSION, sealed_lease  # they import torch
    from tests.runtime.versions import MemoryLease

    return sealed_lease(MemoryLease(VERSION))


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A running zygote and cache agent."""
    with run_installation(tmp_path_factory.mktemp("house") / "data") as each:
        yield each
