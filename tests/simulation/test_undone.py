"""Negative controls of the simulation: each repair that is undone here is found as a defect again."""

import random
import re
import time
from collections.abc import Iterator
from typing import Final

import pytest

from tests.simulation.conftest import PLAYED, RecordProperty
from tests.simulation.core.history_player import search_seeds
from tests.simulation.undone import Repair, repairs
from tests.simulation.worlds import WORLDS

REPAIRS: Final = repairs()
PATIENCE_S: Final = 1200.0  # CPU seconds for each patch; the rarest took 140 s on a slow CPU


def _is_found(name: str, repair: Repair, first: int | None, record_property: RecordProperty) -> None:
    """Check that a history breaks an invariant within PATIENCE_S: that of seed `first`, or a random one."""
    begin, until_s = random.SystemRandom().randrange(1 << 40), time.process_time() + PATIENCE_S
    played = 0

    def seeds() -> Iterator[int]:
        nonlocal played
        if first is not None:
            yield first
        while time.process_time() < until_s:
            played += 1
            yield begin + played

    with repair.undone():
        found = search_seeds(
            WORLDS[repair.world], seeds(), lambda outcome: not re.search(repair.sign, str(outcome.broken))
        )
    assert found is not None, f"{played} histories after seed {begin} do not find it"
    record_property(PLAYED, f"{name} is found by seed {found.history.seed}, {played} random ones: {found.broken}")


@pytest.mark.deep
@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("name", REPAIRS)
def test_undone_repair_is_found_again(name: str, record_property: RecordProperty) -> None:
    """Random histories find it. For a rare defect, a history that is known to find it is played first."""
    _is_found(name, REPAIRS[name], REPAIRS[name].seed, record_property)


@pytest.mark.deep
@pytest.mark.long
@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("name", [name for name, repair in REPAIRS.items() if repair.seed is not None])
def test_undone_repair_is_found_at_random(name: str, record_property: RecordProperty) -> None:
    """Random histories alone find the rare defects, too."""
    _is_found(name, REPAIRS[name], None, record_property)
