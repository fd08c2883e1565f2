"""The process serves, and ends on SIGTERM or with its supervisor. `test_push_killed` tests SIGKILL."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from kelvin.blobstore.file_store import STAGING
from kelvin.contracts.setting_parser import BadSetting
from kelvin.process.startup import STORE_STATUS
from snapshotter.__main__ import check_store
from snapshotter.app.settings import SnapshotterSettings
from tests.snapshotter.process import process_over, wait_until_healthy


def test_snapshotter_ends_on_sigterm_or_without_supervisor(tmp_path: Path) -> None:
    """SIGTERM gives exit status 0, and so does the end of the supervisor."""
    never = threading.Event()
    with process_over(tmp_path) as process:
        with process.client() as client:
            wait_until_healthy(client, never)
            assert client.get("/readyz").status_code == 200
        assert process.end(signal.SIGTERM) == 0
        process.start()
        with process.client() as client:
            wait_until_healthy(client, never)
        process.close()
        assert process.running is not None
        assert process.running.wait(30) == 0


@pytest.mark.parametrize("url", ["file://host/x", "file:///x?y", "file:///dev/null/store", "file://[x", "s3://[x"])
def test_check_refuses_an_unusable_store(tmp_path: Path, url: str) -> None:
    """The check refuses the URL as a start would, even without a data directory."""
    with pytest.raises(BadSetting, match="KELVIN_STORE="):
        asyncio.run(check_store(SnapshotterSettings(tmp_path, url)))


def test_check_makes_no_store(tmp_path: Path) -> None:
    """Only the first start makes the store's directory."""
    asyncio.run(check_store(SnapshotterSettings(tmp_path, (tmp_path / "a" / "store").as_uri())))
    assert not [*tmp_path.iterdir()]


def test_check_says_why_a_directory_is_unusable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is one line on standard error."""
    with pytest.raises(SystemExit) as ended:
        asyncio.run(check_store(SnapshotterSettings(tmp_path, f"file:///{'a' * 300}")))
    assert ended.value.code == STORE_STATUS
    assert capsys.readouterr().err == "the store's directory can't be used: File name too long\n"


def test_check_changes_nothing_in_a_store(tmp_path: Path) -> None:
    """The check makes no directory in an existing store, and removes no leftover of a crashed write."""
    store, leftover = tmp_path / "store", tmp_path / "crashed" / STAGING / "left"
    store.mkdir()
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    os.utime(leftover, (0, 0))
    asyncio.run(check_store(SnapshotterSettings(tmp_path, store.as_uri())))
    asyncio.run(check_store(SnapshotterSettings(tmp_path, (tmp_path / "crashed").as_uri())))
    assert not [*store.iterdir()]
    assert leftover.exists()
