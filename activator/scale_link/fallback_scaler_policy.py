"""Choose the runtime to which an activator gives a version while there is no control plane. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from activator.routing.policy.version_key import VersionKey
from kelvin.contracts.accounting.meter_format import Meter, Phase
from kelvin.contracts.artifacts.runtime_control import RuntimeReport, RuntimeState

SLEEPING: Final = (RuntimeState.ASLEEP, RuntimeState.DEEP_SLEEP)


@dataclass(frozen=True, slots=True)
class AlreadyServing:
    """A runtime already serves the version. The feed has not reported it."""

    report: RuntimeReport


@dataclass(frozen=True, slots=True)
class StartRuntime:
    """Start a parked standby, or wake a sleeping replica of the version (`wakes`)."""

    report: RuntimeReport
    wakes: bool


@dataclass(frozen=True, slots=True)
class NoStart:
    """No runtime may be started now; `reason` is for the log."""

    reason: str


Choice = AlreadyServing | StartRuntime | NoStart


def choose_runtime(key: VersionKey, reports: Sequence[RuntimeReport], held: int, slots: int) -> Choice:
    """Return the first choice that applies.

    1. A replica is ready: use it.
    2. A replica is being restored: wait.
    3. Every device slot is held: no start.
    4. A replica of the version sleeps: wake it, since that is faster.
    5. A standby is parked: start it.
    6. Otherwise no start.
    """
    of_version = [each for each in reports if (each.tenant, each.model, each.version) == key]
    # (1)
    for report in of_version:
        if report.state is RuntimeState.READY:
            return AlreadyServing(report)
    # (2)
    if any(each.state is RuntimeState.RESTORING for each in of_version):
        return NoStart("one is on its way")
    # (3)
    if held >= slots:
        return NoStart("every device slot is held")
    # (4)
    for report in of_version:
        if report.state in SLEEPING:
            return StartRuntime(report, wakes=True)
    # (5)
    for report in reports:
        if report.state is RuntimeState.STANDBY and report.tenant is None:
            return StartRuntime(report, wakes=False)
    # (6)
    return NoStart("no standby is parked")


def holds_slot(meter: Meter) -> bool:
    """Return whether a living process with this meter page holds a device slot: it has a version and does not sleep."""
    return bool(meter.tenant) and meter.phase is not Phase.STANDBY
