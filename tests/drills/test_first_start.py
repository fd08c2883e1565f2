"""`kelvin up` on a new directory, killed with all its processes at stages and random moments, still starts later."""

import contextlib
import os
import random
import time
from pathlib import Path
from typing import Final

import pytest

from coldstart_bench.harness.request_outcome import ANSWERED
from tests.drills.drill_installation import SERVED, DrillInstallation
from tests.drills.drill_models import TinyModels
from tests.drills.stage_drill import kill
from tests.eventually import wait

pytestmark = [pytest.mark.deep, pytest.mark.timeout(3000)]

KILLS = int(os.environ.get("KELVIN_TEST_KILLS", "3"))
LAST_S = 8.0  # latest moment of a kill; most files exist by then
# Files of a new data directory, in the order in which a first start creates them.
STAGES: Final = ("kelvin.db", "spool", "run/control.sock")


def _kill(installation: DrillInstallation) -> None:
    installation.record_processes()
    kill(installation.all_processes())
    installation.wait_processes_gone()


def test_first_start_killed_anywhere_goes_on(tmp_path: Path) -> None:
    """The installation becomes ready, a push and a request succeed, and the bill is exact."""
    installation, seed = DrillInstallation(tmp_path / "data"), random.randrange(2**32)
    chance = random.Random(seed)
    with contextlib.ExitStack() as stack:
        stack.callback(installation.abandon)
        for stage in STAGES:
            installation.begin()
            wait((installation.data / stage).exists, f"a start makes {stage}")
            _kill(installation)
        for _ in range(KILLS):
            installation.begin()
            time.sleep(chance.uniform(0.1, LAST_S))  # the test chooses the moment
            _kill(installation)
        installation.start()
        installation.wait_until_whole()
        assert installation.call_admin("GET", "/admin/v1/models") == {"models": []}
        with contextlib.closing(installation.push(TinyModels(tmp_path).served, SERVED)) as push:
            assert push.outcome() == ANSWERED, (seed, push.outputs())
        installation.expect_answer()
        assert installation.settle_bill([]) == [], seed
        installation.stop()
