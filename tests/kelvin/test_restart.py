"""`kelvin restart` where there is nothing to restart; with an installation: tests/e2e/test_restart.py."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kelvin.main import main


@pytest.mark.parametrize(
    "lock",
    [
        pytest.param(None, id="no data directory"),
        pytest.param("", id="nobody"),
        pytest.param(str(os.getpid()), id="a process that is no supervisor"),
        pytest.param("999999999", id="a process that is no more"),
    ],
)
def test_nothing_runs(tmp_path: Path, lock: str | None) -> None:
    """It is said, nobody is signalled, and nothing is made."""
    data = tmp_path / "data"
    if lock is not None:
        (data / "run").mkdir(parents=True)
        (data / "lock").write_text(lock)
    done = CliRunner().invoke(main, ["restart", "activator", "--data", str(data)])
    assert done.exit_code == 1
    assert "no installation runs" in done.output
    assert data.exists() == (lock is not None)
