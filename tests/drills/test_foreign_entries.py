"""An installation starts and works with foreign entries of every kind in every directory of its data directory."""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldstart_bench.harness.request_outcome import ANSWERED
from tests.drills.drill_installation import SERVED, DrillInstallation, running_drill_installation, wait
from tests.drills.drill_models import TinyModels
from tests.drills.stage_drill import kill

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

# Root can read every directory. Without these capabilities it cannot, like any other user.
AS_USER = ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search"]
# Some names begin or end like Kelvin's own.
STRAY_FILES = (
    "stray", "stray file\nof two lines", ".hidden", "00000000000000000001.seg.old", "rt-stray.sock",
    "7.stray", "stray.log", "kelvin-stray.backup",
)  # fmt: skip
STRAY_DIRECTORIES = (
    "stray.d", "a/b/c/d", os.fsdecode(b"not \xff UTF-8"), "e" * 64, "rt-directory.sock", "8.directory", "directory.log",
)  # fmt: skip
OURS = ("cache", "logs", "run", "spool", "staging", "store", "tls", "trust")


@pytest.fixture
def models(tmp_path: Path) -> TinyModels:
    """Models: one is served, others are pushed."""
    return TinyModels(tmp_path)


@pytest.fixture
def littered(tmp_path: Path, models: TinyModels) -> Iterator[DrillInstallation]:
    """An installation that was killed as a whole and not started again, with foreign entries everywhere."""
    prefix = AS_USER if os.geteuid() == 0 else []
    installation = DrillInstallation(
        tmp_path / "data", prefix=prefix, settings={"KELVIN_BACKUP": str(tmp_path / "backups")}
    )
    with running_drill_installation(installation, models.served):
        installation.record_processes()
        kill(installation.all_processes())
        installation.wait_processes_gone()
        for directory in _directories(installation.data, tmp_path / "backups"):
            _litter(directory)
        installation.data.chmod(0o755)
        try:
            yield installation
        finally:
            for lost in tmp_path.rglob("lost+found"):
                lost.chmod(0o700)


def _directories(*tops: Path) -> list[Path]:
    found = []
    for top in tops:
        found += [top, *(path for path in top.rglob("*") if path.is_dir())]
    return found


def _litter(directory: Path) -> None:
    for name in STRAY_FILES:
        (directory / name).write_bytes(b"not ours\n")
    for name in STRAY_DIRECTORIES:
        (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / name / "inner").write_bytes(b"not ours\n")
    (directory / "dangling").symlink_to(directory / "nowhere")
    lost = directory / "lost+found"
    lost.mkdir()
    lost.chmod(0)


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root reads every directory")
def test_start_over_foreign_entries(littered: DrillInstallation, models: TinyModels) -> None:
    """It starts, answers, pushes, collects, bills and ends cleanly, and foreign entries stay. A data directory that
    others could read becomes private.
    """
    littered.start()
    assert stat.S_IMODE(littered.data.stat().st_mode) == 0o700
    littered.wait_until_whole()
    littered.expect_answer()
    assert littered.settle_bill([]) == []
    with contextlib.closing(littered.push(models.fresh(), "another")) as push:
        assert push.outcome() == ANSWERED, push.outputs()
    backup = ["backup", str(littered.data.parent / "one.backup")]
    bills = (["billing", "report"], ["billing", "reconcile"], ["billing", "verify"])
    for words in (["status"], ["models"], ["collect", "--run"], backup, *bills):
        status, out, err = littered.kelvin(*words)
        assert (words, status, "Traceback" in out + err) == (words, 0, False), out + err
    for words in (["fsck"], ["doctor"]):  # they name the entries that they find
        _, out, err = littered.kelvin(*words)
        assert "Traceback" not in out + err, out + err
    littered.scale_to_zero()
    littered.call_admin("DELETE", f"/admin/v1/models/{SERVED}?force=true")
    wait(lambda: littered.kelvin("collect", "--run")[0] == 0, "a model is freed")
    littered.stop()
    for log in (littered.data / "logs").glob("*.log"):
        assert log.is_dir() or "Traceback" not in log.read_text(), log
    for directory in (littered.data, *(littered.data / name for name in OURS)):
        if directory.exists():
            assert (directory / STRAY_FILES[0]).read_bytes() == b"not ours\n", directory
            assert (directory / STRAY_DIRECTORIES[0] / "inner").exists(), directory
