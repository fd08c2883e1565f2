"""A data directory that will contain keys is made private, or refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kelvin.supervisor.data_lock import InsecureDirectory, data_lock


def test_new_directory_is_its_owners_alone(tmp_path: Path) -> None:
    """The mode is 0700 for any umask."""
    before = os.umask(0)
    try:
        with data_lock(tmp_path / "data", keeps_secrets=True):
            assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_open_directory_of_ours_is_closed(tmp_path: Path) -> None:
    """Mode 0755, the default of `mkdir`, becomes 0700."""
    tmp_path.chmod(0o755)
    with data_lock(tmp_path, keeps_secrets=True):
        assert tmp_path.stat().st_mode & 0o777 == 0o700


START = """
import asyncio, sys
from pathlib import Path
from kelvin.supervisor.settings import EngineSettings, PodSettings
from kelvin.supervisor.engine_supervisor import run_engine
from kelvin.supervisor.pod_supervisor import run_pod
asyncio.run = lambda work: work.close()
data = Path(sys.argv[1])
{run}
"""


@pytest.mark.parametrize("run", ["run_engine(EngineSettings(data, ''))", "run_pod(PodSettings(data, 1, {}, None))"])
def test_supervisor_logs_as_json_that_it_closed_the_directory(tmp_path: Path, run: str) -> None:
    """The log line has the previous mode."""
    tmp_path.chmod(0o755)
    command = [sys.executable, "-c", START.format(run=run), str(tmp_path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    assert json.loads(done.stderr)["mode_was"] == "0755"


def test_open_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names owner, mode and the fix. A pod keeps no keys there and uses the directory as it is."""
    tmp_path.chmod(0o755)
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with (
        pytest.raises(InsecureDirectory, match=f"belongs to user {owner} and has mode 0755: .* chmod 0700"),
        data_lock(tmp_path, keeps_secrets=True),
    ):
        pass
    assert not (tmp_path / "lock").exists()
    with data_lock(tmp_path):
        assert tmp_path.stat().st_mode & 0o777 == 0o755
