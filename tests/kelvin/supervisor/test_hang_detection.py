"""When a process counts as hanging, from the results of its probes."""

import pytest

from kelvin.supervisor.restart_policy import COUNTED_PROBE_S_MAX, SILENT_S, START_S, SilenceTimer

ProbeResult = tuple[bool, float]  # whether it answered, and how long the probe took
GOOD: ProbeResult = (True, 3.0)
BAD: ProbeResult = (False, 6.0)


@pytest.mark.parametrize(
    ("probes", "hangs"),
    [
        pytest.param([], False, id="no probe yet"),
        pytest.param([GOOD, BAD, BAD], False, id="silent for less than the limit"),
        pytest.param([GOOD, BAD, BAD, BAD], True, id="silent for the limit"),
        pytest.param([GOOD, BAD, BAD, GOOD, BAD, BAD], False, id="an answer ends a silence"),
        pytest.param([BAD] * 4, False, id="a process that never answered is still starting"),
        pytest.param([BAD] * round(START_S / 6.0), True, id="a process that never starts"),
        pytest.param([GOOD, (False, 3600.0), (False, 3600.0)], False, id="a pause of the machine doesn't count"),
    ],
)
def test_process_hangs_after_a_silence(probes: list[ProbeResult], hangs: bool) -> None:
    """Each probe counts for its duration, up to COUNTED_PROBE_S_MAX."""
    silence = SilenceTimer()
    for answers, probe_s in probes:
        silence = silence.after_probe(answers, probe_s)
    assert silence.is_hung(START_S) == hangs


def test_one_probe_is_never_enough() -> None:
    """A supervisor that had no processor time for an hour must not kill its children."""
    assert COUNTED_PROBE_S_MAX < SILENT_S < START_S
