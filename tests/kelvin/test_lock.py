"""A data directory that will hold keys is closed to other users, or refused."""

import os
from pathlib import Path

import pytest

from kelvin.supervisor.lock import OpenToOthers, data_lock


def test_new_directory_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever the umask."""
    before = os.umask(0)
    try:
        with data_lock(tmp_path / "data", keeps_secrets=True):
            assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_open_directory_of_ours_is_closed(tmp_path: Path) -> None:
    """Mode 0755, as `mkdir` makes it, becomes 0700."""
    tmp_path.chmod(0o755)
    with data_lock(tmp_path, keeps_secrets=True):
        assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_open_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names owner, mode and what to do. A pod, which keeps no keys there, takes it as it is."""
    tmp_path.chmod(0o755)
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with (
        pytest.raises(OpenToOthers, match=f"belongs to user {owner} and has mode 0755: .* chmod 0700"),
        data_lock(tmp_path, keeps_secrets=True),
    ):
        pass
    assert not (tmp_path / "lock").exists()
    with data_lock(tmp_path):
        assert tmp_path.stat().st_mode & 0o777 == 0o755
