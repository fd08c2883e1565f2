"""Linear and weighted averages, a setting of each model, in the autoscaler of one machine."""

import pytest

from controlplane.scaling.policy.scale_settings import ScaleSettings
from tests.controlplane.scaling.autoscaler_fixture import (
    AutoscalerScenario,
    replace_scale,
    running_autoscaler,
    wake_version,
)

LINEAR = ScaleSettings(max=8, grace_s=0.0)
WEIGHTED = replace_scale(LINEAR, average="weighted")


async def _steady(w: AutoscalerScenario, scale: ScaleSettings, name: str) -> None:
    """Apply 20 concurrent streams for two minutes: three replicas of ten streams, and panic mode is over."""
    which = w.catalogue.add(name, scale, max_streams=10)
    await wake_version(w, which)
    for _ in range(120):
        await w.pass_seconds(1, which, 20.0)
        for _ in range(w.actuator.starting.get(which, 0)):
            w.actuator.become_ready(which)
    assert w.actuator.ready_count(which) == 3


async def _after(w: AutoscalerScenario, name: str, scale: ScaleSettings, pass_seconds: int, concurrency: float) -> int:
    """Return the number of replicas after this time under this load."""
    which = w.catalogue.add(name, scale, max_streams=10)
    await w.pass_seconds(pass_seconds, which, concurrency)
    return w.actuator.live_count(which)


@pytest.mark.parametrize(
    ("scale", "want"),
    [
        pytest.param(LINEAR, 3, id="linear: still near the old load"),
        pytest.param(WEIGHTED, 1, id="weighted: already near the new load"),
    ],
)
async def test_weighted_average_falls_sooner_after_load(scale: ScaleSettings, want: int) -> None:
    """The load falls to a fifth for twelve seconds."""

    async with running_autoscaler(slots=20) as w:
        await _steady(w, scale, "m")
        assert await _after(w, "m", scale, 12, 4.0) == want


async def test_changing_average_keeps_the_window_values() -> None:
    """The change itself adds and ends no replica. After the change back, the linear window still has all its values."""

    async with running_autoscaler(slots=20) as w:
        await _steady(w, LINEAR, "m")
        assert await _after(w, "m", WEIGHTED, 4, 20.0) == 3
        assert await _after(w, "m", LINEAR, 12, 4.0) == 3
        assert await _after(w, "m", WEIGHTED, 3, 4.0) == 1


async def test_weighted_average_reaches_zero_without_reports() -> None:
    """The last replica leaves after a stable window without reports, as with the linear average."""

    async with running_autoscaler(slots=20) as w:
        which = w.catalogue.add("m", WEIGHTED, max_streams=10)
        await wake_version(w, which)
        await w.pass_seconds(5, which, 3.0)
        await w.pass_seconds(50)
        assert w.actuator.live_count(which) == 1
        await w.pass_seconds(60)
        assert w.actuator.live_count(which) == 0
