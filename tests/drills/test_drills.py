"""A sample of the matrix as `make drills` runs it. Negative controls on a real installation: wrong cells are red."""

import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from coldstart_bench.harness.request_outcome import ANSWERED, CUT, bill_totals_of, refused_with
from tests.drills.drill_installation import DrillInstallation, running_drill_installation, wait
from tests.drills.drill_models import TinyModels
from tests.drills.matrix import Stage, VictimProcess
from tests.drills.operations import ROOT, PreconditionFailed
from tests.drills.stage_drill import kill_at

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1200)]

# A kill of each kind of outcome, one in a repeated push, a fault, the first minute, and two damaged files.
SAMPLE = (
    "runtime/decode",
    "activator/decode",
    "client/decode",
    "supervisor/decode",
    "client/seal",
    "sqlite-locked/push",
    "everything/first-start",
    "activator/before-lease",
    "tls/ca.key/torn",
    "kelvin.db/empty",
)


def test_sample_of_drills_passes() -> None:
    """The sample covers the cells, the bill after each, and the closing checks of each group."""
    words = [word for cell in SAMPLE for word in ("--cell", cell)]
    command = [sys.executable, "-m", "tests.drills", "--seed", str(random.randrange(2**32)), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for cell in (*SAMPLE, "after decode", "after seal", "after everything-0", "after sqlite-locked"):
        assert f"green {cell} " in done.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """The models of this file."""
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def installation(models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrillInstallation]:
    """An installation for the negative controls."""
    with running_drill_installation(
        DrillInstallation(tmp_path_factory.mktemp("drill") / "data"), models.served
    ) as installation:
        yield installation


def test_wrong_expectation_fails_the_cell(installation: DrillInstallation, models: TinyModels) -> None:
    """Negative control: the same kills with another expected outcome are red."""
    seen, wrong = kill_at(installation, models, VictimProcess.RUNTIME, Stage.DECODE, ANSWERED)
    assert (seen, wrong) == (refused_with("replica_lost"), ["expected answered, seen refused replica_lost"])
    seen, wrong = kill_at(installation, models, VictimProcess.SNAPSHOTTER, Stage.DECODE, CUT)
    assert (seen, wrong) == (ANSWERED, ["expected cut, seen answered"])


def test_missed_kill_fails_the_cell(
    installation: DrillInstallation, models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: if the request has ended before, no process is killed, and the cell is red."""
    monkeypatch.setattr("tests.drills.stages.LONG_TOKENS", 1)
    monkeypatch.setattr("tests.drills.stages.BEGUN_WORDS", 1)
    monkeypatch.setattr("tests.drills.stage_drill.TRIES", 2)
    cache = installation.process(VictimProcess.CACHE)
    with pytest.raises(PreconditionFailed, match="met its stage"):
        kill_at(installation, models, VictimProcess.CACHE, Stage.DECODE, ANSWERED)
    assert cache.is_running()


def test_a_request_that_the_client_did_not_count_is_red(
    installation: DrillInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the bill has one request that the client did not count."""
    monkeypatch.setattr("tests.drills.drill_installation.SETTLED_S", 3.0)
    before = bill_totals_of(installation.bill()).requests
    with installation.call(2) as call:
        (ending,) = call.endings()
    assert ending.outcome == ANSWERED
    wait(lambda: bill_totals_of(installation.bill()).requests > before, "the bill has heard of it")
    assert any("1 more requests, the client counted 0" in line for line in installation.settle_bill([]))


def test_a_record_that_is_dropped_is_red(installation: DrillInstallation) -> None:
    """Negative control: with one row less in the ledger, the command of the closing checks fails."""
    assert installation.kelvin("billing", "verify")[0] == 0
    with closing(sqlite3.connect(installation.data / "kelvin.db", timeout=30)) as database, database:
        database.execute("DELETE FROM ledger_requests WHERE rowid = (SELECT max(rowid) FROM ledger_requests)")
    status, _, err = installation.kelvin("billing", "verify")
    assert status == 2, err
