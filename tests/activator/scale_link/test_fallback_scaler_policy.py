"""Which runtime a version gets while no control plane decides."""

import pytest

from activator.routing.policy.version_key import VersionKey
from activator.scale_link.fallback_scaler_policy import (
    AlreadyServing,
    Choice,
    NoStart,
    StartRuntime,
    choose_runtime,
    holds_slot,
)
from kelvin.contracts.accounting.meter_format import Meter, Phase
from kelvin.contracts.artifacts.runtime_control import RuntimeReport, RuntimeState

KEY = VersionKey("t", "m", "v" * 64)


def report(name: str, state: RuntimeState, key: VersionKey | None = KEY) -> RuntimeReport:
    """Return the report of a runtime in this state."""
    if key is None:
        return RuntimeReport(runtime_id=name, pid=1, state=state)
    return RuntimeReport(runtime_id=name, pid=1, state=state, tenant=key.tenant, model=key.model, version=key.version)


PARKED = report("parked", RuntimeState.STANDBY, None)
READY = report("ready", RuntimeState.READY)
RESTORING = report("restoring", RuntimeState.RESTORING)
ASLEEP = report("asleep", RuntimeState.ASLEEP)
ASLEEP2 = report("asleep2", RuntimeState.DEEP_SLEEP)
OTHERS = [report(state.value, state, KEY._replace(model="other")) for state in RuntimeState]
NO_ROOM, NONE, COMING = (
    NoStart(why) for why in ("every device slot is held", "no standby is parked", "one is on its way")
)


@pytest.mark.parametrize(
    ("reports", "held", "want"),
    [
        pytest.param([PARKED], 1, StartRuntime(PARKED, wakes=False), id="a parked standby"),
        pytest.param(
            [*OTHERS, PARKED], 1, StartRuntime(PARKED, wakes=False), id="runtimes of another version are ignored"
        ),
        pytest.param([PARKED], 2, NO_ROOM, id="all device slots are held"),
        pytest.param([], 0, NONE, id="no runtime"),
        pytest.param(OTHERS, 0, NONE, id="no free runtime"),
        pytest.param([PARKED, READY], 2, AlreadyServing(READY), id="a runtime already serves the version"),
        pytest.param([PARKED, RESTORING], 1, COMING, id="a runtime is restoring the version"),
        pytest.param([PARKED, ASLEEP], 1, StartRuntime(ASLEEP, wakes=True), id="a sleeping runtime is ready sooner"),
        pytest.param([ASLEEP2], 1, StartRuntime(ASLEEP2, wakes=True), id="a deep sleeper"),
        pytest.param([ASLEEP], 2, NO_ROOM, id="a sleeping runtime needs a slot too"),
        pytest.param(
            [report("d", RuntimeState.DRAINING), PARKED],
            1,
            StartRuntime(PARKED, wakes=False),
            id="a draining runtime is ignored",
        ),
    ],
)
def test_chooses_ready_then_sleeping_then_standby_runtime(
    reports: list[RuntimeReport], held: int, want: Choice
) -> None:
    """The machine has two device slots."""
    assert choose_runtime(KEY, reports, held, 2) == want


@pytest.mark.parametrize(
    ("tenant", "phase", "want"),
    [
        pytest.param("", Phase.STANDBY, False, id="parked"),
        pytest.param("t", Phase.STANDBY, False, id="asleep"),
        *(pytest.param("t", phase, True, id=phase.name.lower()) for phase in Phase if phase is not Phase.STANDBY),
    ],
)
def test_awake_version_holds_a_device_slot(tenant: str, phase: Phase, want: bool) -> None:
    """The meter page decides, as it does for billing."""
    assert holds_slot(Meter(phase, 0, 0, tenant=tenant)) is want
