"""The ground of scenarios: a run directory with a fake zygote in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controlplane.ground import Run, fake_zygote


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    where = Run(tmp_path / "run")
    with fake_zygote(where):
        yield where
