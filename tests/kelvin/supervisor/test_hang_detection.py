"""When a process counts as hanging, from the results of its probes."""

import pytest

from kelvin.supervisor.restart_policy import COUNTED_PROBE_S_MAX, SILENT_S, START_S, SilenceTimer

Look = tuple[bool, float]  # whether it answered, and how long the probe took
GOOD: Look = (True, 3.0)
BAD: Look = (False, 6.0)


@pytest.mark.parametrize(
    ("looks", "hangs"),
    [
        pytest.param([], False, id="nothing was seen"),
        pytest.param([GOOD, BAD, BAD], False, id="silent for less than the limit"),
        pytest.param([GOOD, BAD, BAD, BAD], True, id="silent for the limit"),
        pytest.param([GOOD, BAD, BAD, GOOD, BAD, BAD], False, id="an answer ends a silence"),
        pytest.param([BAD] * 4, False, id="one that never answered is still starting"),
        pytest.param([BAD] * round(START_S / 6.0), True, id="one that does not come up"),
        pytest.param([GOOD, (False, 3600.0), (False, 3600.0)], False, id="a paused machine says nothing of it"),
    ],
)
def test_process_hangs_after_a_silence(looks: list[Look], hangs: bool) -> None:
    """Each probe counts for its duration, up to COUNTED_PROBE_S_MAX."""
    silence = SilenceTimer()
    for answers, look_s in looks:
        silence = silence.after_probe(answers, look_s)
    assert silence.hangs(START_S) == hangs


def test_one_look_is_never_enough() -> None:
    """A supervisor that had no processor time for an hour must not kill its children."""
    assert COUNTED_PROBE_S_MAX < SILENT_S < START_S
