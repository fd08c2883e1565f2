"""`kelvin up` on a new directory, killed with all its processes at random moments, until it may go on."""

import contextlib
import os
import random
import time
from pathlib import Path

import pytest

from coldstart_bench.endings import ANSWERED
from tests.drills.drill import kill
from tests.drills.ground import SERVED, Ground
from tests.drills.models import TinyModels

pytestmark = [pytest.mark.deep, pytest.mark.timeout(3000)]

KILLS = int(os.environ.get("KELVIN_TEST_KILLS", "3"))
LAST_S = 8.0  # of the moments at which it is killed; most of what is made is made by then


def test_first_start_killed_anywhere_goes_on(tmp_path: Path) -> None:
    """Whatever the kills left half made: it becomes ready, a push and a request go well, and the bill is exact."""
    ground, seed = Ground(tmp_path / "data"), random.randrange(2**32)
    chance = random.Random(seed)
    with contextlib.ExitStack() as stack:
        stack.callback(ground.abandon)
        for _ in range(KILLS):
            ground.begin()
            time.sleep(chance.uniform(0.1, LAST_S))
            ground.note_family()
            kill(ground.everything())
            ground.gone()
        ground.start()
        ground.wait_until_whole()
        with contextlib.closing(ground.push(TinyModels(tmp_path).served, SERVED)) as push:
            assert push.outcome() == ANSWERED, (seed, push.said())
        ground.expect_answer()
        assert ground.settle([]) == [], seed
        ground.stop()
