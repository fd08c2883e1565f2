"""A measurement begins when the standbys have done what they do once they are parked."""

import os
import time

import pytest

from coldstart_bench.rest import Rest, cpu_ticks


@pytest.mark.parametrize(
    ("seen", "want"),
    [
        pytest.param([(0.0, 5), (0.5, 5), (0.6, 5)], [False, False, True], id="quiet for as long as asked"),
        pytest.param([(0.0, 5), (0.5, 9), (0.6, 9), (1.1, 9)], [False, False, False, True], id="work begins it anew"),
        pytest.param([(0.0, 5), (0.3, 6), (0.6, 6)], [False, False, True], id="a tick is noise"),
        pytest.param([(0.0, 5), (0.3, 6), (0.6, 7)], [False, False, False], id="a tick each time is work"),
        pytest.param([(0.0, 5), (0.5, 1), (0.7, 1)], [False, False, False], id="another process is there"),
    ],
)
def test_rest(seen: list[tuple[float, int]], want: list[bool]) -> None:
    """By processor time alone."""
    rest = Rest(0.6)
    assert [rest.sees(ticks, now) for now, ticks in seen] == want


def test_the_time_that_a_process_takes_is_seen() -> None:
    """This one's; one that is not there takes none."""
    before, limit = cpu_ticks([os.getpid()]), time.monotonic() + 30
    while cpu_ticks([os.getpid(), 0]) < before + 3:
        assert time.monotonic() < limit
    assert cpu_ticks([0]) == 0
