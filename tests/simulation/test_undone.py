"""What the simulation is worth: each repair that is undone here is found again, from seeds that nobody has chosen."""

import random
import re
import time
from collections.abc import Iterator
from typing import Final

import pytest

from tests.simulation.conftest import PLAYED, Tell
from tests.simulation.play import search
from tests.simulation.undone import names, undone
from tests.simulation.worlds import WORLDS

PATIENCE_S: Final = 400.0  # of the processor, for each patch; the rarest is found once in 40 s


@pytest.mark.deep
@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("name", names())
def test_undone_repair_is_found_again(name: str, record_property: Tell) -> None:
    """Some history breaks an invariant within the time that a patch is given."""
    begin, until_s = random.SystemRandom().randrange(1 << 40), time.process_time() + PATIENCE_S
    played = 0

    def seeds() -> Iterator[int]:
        nonlocal played
        while time.process_time() < until_s:
            yield begin + played
            played += 1

    with undone(name) as (world, sign):
        found = search(WORLDS[world], seeds(), lambda outcome: not re.search(sign, str(outcome.broken)))
    assert found is not None, f"{played} histories from seed {begin} on do not find it"
    record_property(PLAYED, f"{name} is found by history {played + 1} from seed {begin} on: {found.broken}")
