"""Which runtime an activator gives a version while no control plane decides, if any. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from activator.routing.policy.version_key import VersionKey
from kelvin.contracts.accounting.meter_format import Meter, Phase
from kelvin.contracts.artifacts.runtime_control import RuntimeReport, RuntimeState

SLEEPING: Final = (RuntimeState.ASLEEP, RuntimeState.ASLEEP2)


@dataclass(frozen=True, slots=True)
class AlreadyServing:
    """It serves the version already; the feed had no time to say so."""

    report: RuntimeReport


@dataclass(frozen=True, slots=True)
class StartRuntime:
    """A parked standby, or a replica of the version that sleeps and `wakes`."""

    report: RuntimeReport
    wakes: bool


@dataclass(frozen=True, slots=True)
class NoStart:
    """Nobody is to be given it now."""

    why: str


Choice = AlreadyServing | StartRuntime | NoStart


def choose(key: VersionKey, reports: Sequence[RuntimeReport], held: int, slots: int) -> Choice:
    """Who is there comes first, then who is on the way, then room, then who is the sooner ready."""
    own = [each for each in reports if (each.tenant, each.model, each.version) == key]
    for report in own:
        if report.state is RuntimeState.READY:
            return AlreadyServing(report)
    if any(each.state is RuntimeState.RESTORING for each in own):
        return NoStart("one is on its way")
    if held >= slots:
        return NoStart("every device slot is held")
    for report in own:
        if report.state in SLEEPING:
            return StartRuntime(report, wakes=True)
    for report in reports:
        if report.state is RuntimeState.STANDBY and report.tenant is None:
            return StartRuntime(report, wakes=False)
    return NoStart("no standby is parked")


def holds_slot(meter: Meter) -> bool:
    """Whether a living process with this meter page has a device slot: it has a version, and does not sleep."""
    return bool(meter.tenant) and meter.phase is not Phase.STANDBY
