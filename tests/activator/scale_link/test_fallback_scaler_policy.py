"""Which runtime a version is given while no control plane decides."""

import pytest

from activator.routing.policy.version_key import VersionKey
from activator.scale_link.fallback_scaler_policy import (
    AlreadyServing,
    Choice,
    NoStart,
    StartRuntime,
    choose,
    holds_slot,
)
from kelvin.contracts.accounting.meter_format import Meter, Phase
from kelvin.contracts.artifacts.runtime_control import RuntimeReport, RuntimeState

KEY = VersionKey("t", "m", "v" * 64)


def said(name: str, state: RuntimeState, key: VersionKey | None = KEY) -> RuntimeReport:
    """What a runtime of that name says."""
    if key is None:
        return RuntimeReport(runtime_id=name, pid=1, state=state)
    return RuntimeReport(runtime_id=name, pid=1, state=state, tenant=key.tenant, model=key.model, version=key.version)


PARKED = said("parked", RuntimeState.STANDBY, None)
READY = said("ready", RuntimeState.READY)
RESTORING = said("restoring", RuntimeState.RESTORING)
ASLEEP = said("asleep", RuntimeState.ASLEEP)
ASLEEP2 = said("asleep2", RuntimeState.ASLEEP2)
OTHERS = [said(state.value, state, KEY._replace(model="other")) for state in RuntimeState]
NO_ROOM, NONE, COMING = (
    NoStart(why) for why in ("every device slot is held", "no standby is parked", "one is on its way")
)


@pytest.mark.parametrize(
    ("reports", "held", "want"),
    [
        pytest.param([PARKED], 1, StartRuntime(PARKED, wakes=False), id="a parked standby"),
        pytest.param(
            [*OTHERS, PARKED], 1, StartRuntime(PARKED, wakes=False), id="and nobody's that has another version"
        ),
        pytest.param([PARKED], 2, NO_ROOM, id="never over the slots"),
        pytest.param([], 0, NONE, id="nobody is there"),
        pytest.param(OTHERS, 0, NONE, id="nobody is free"),
        pytest.param([PARKED, READY], 2, AlreadyServing(READY), id="one that serves already, whatever room there is"),
        pytest.param([PARKED, RESTORING], 1, COMING, id="one is on its way: never a second one"),
        pytest.param([PARKED, ASLEEP], 1, StartRuntime(ASLEEP, wakes=True), id="one that sleeps is the sooner ready"),
        pytest.param([ASLEEP2], 1, StartRuntime(ASLEEP2, wakes=True), id="also without its weights"),
        pytest.param([ASLEEP], 2, NO_ROOM, id="a sleeper needs a slot, too"),
        pytest.param(
            [said("d", RuntimeState.DRAINING), PARKED], 1, StartRuntime(PARKED, wakes=False), id="one that leaves"
        ),
    ],
)
def test_chooses_ready_then_sleeping_then_standby_runtime(
    reports: list[RuntimeReport], held: int, want: Choice
) -> None:
    """Of a machine with two slots."""
    assert choose(KEY, reports, held, 2) == want


@pytest.mark.parametrize(
    ("tenant", "phase", "want"),
    [
        pytest.param("", Phase.STANDBY, False, id="parked"),
        pytest.param("t", Phase.STANDBY, False, id="asleep"),
        *(pytest.param("t", phase, True, id=phase.name.lower()) for phase in Phase if phase is not Phase.STANDBY),
    ],
)
def test_awake_version_holds_a_device_slot(tenant: str, phase: Phase, want: bool) -> None:
    """By the page on which it is billed."""
    assert holds_slot(Meter(phase, 0, 0, tenant=tenant)) is want
