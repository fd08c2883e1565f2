"""What is known of a GPU, and whether work may be left on it. Pure; who asks it is `service/nvml.py`.

Sources: NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors); "GPU Memory Error Management"
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt), on pending and failed row remapping and the recovery action; and, for
what a scheduler makes of an XID, NVIDIA's device plugin for Kubernetes (internal/rm/health.go): it and we agree.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# Of an application, and the device is as good as before: what the device plugin passes over.
APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
# Told, and work goes on: a row that will be remapped at the next reset (63), many corrected errors (92), an error that
# was contained in the process that it hit (94), and a change of the recovery action, which is asked for itself (154).
NOTED_XIDS: Final = frozenset({63, 92, 94, 154})
# NVML_GPU_RECOVERY_ACTION_*: what the driver asks for. Traffic between devices (3) is not ours: one device each.
RECOVERIES: Final = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    4: "a drain and a reset of the GPU",
    5: "a recovery of the IMEX domain",
    6: "a reset of its bus",
    7: "a reboot of the system",
}
DRAIN_P2P: Final = 3


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One device, or a part of one. None is what it doesn't say: a MIG part, a card without ECC, an older driver."""

    name: str  # of the device, as its driver calls it
    lost: bool = False  # it does not answer any more
    xids: tuple[int, ...] = ()  # since we listen, each once
    recovery: int | None = None  # what the driver asks for
    uncorrected: int | None = None  # ECC errors since the driver was loaded
    uncorrected_ever: int | None = None
    remap_pending: bool | None = None  # of rows, at the next reset
    remap_failed: bool | None = None
    pages_pending: bool | None = None  # of retirement, on devices without remapping
    temperature_c: int | None = None
    slows_c: int | None = None  # from which on it slows down
    ends_c: int | None = None  # from which on it switches itself off
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Healthy:
    """Nothing is known against it."""


@dataclass(frozen=True, slots=True)
class Degraded:
    """It computes right, for now: somebody should look at it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unhealthy:
    """Nothing is to be left on it."""

    reason: str


GpuHealth = Healthy | Degraded | Unhealthy


def judge(facts: GpuFacts) -> GpuHealth:
    """First reason wins, and what forbids work comes before what doesn't."""
    if (reason := _forbids(facts)) is not None:
        return Unhealthy(reason)
    if (reason := _worries(facts)) is not None:
        return Degraded(reason)
    return Healthy()


def worst(devices: Iterable[GpuFacts]) -> GpuHealth:
    """Of all of them; the reason names the device."""
    found: GpuHealth = Healthy()
    for facts in devices:
        match judge(facts):
            case Unhealthy(reason):
                return Unhealthy(f"{facts.name}: {reason}")
            case Degraded(reason) if found == Healthy():
                found = Degraded(f"{facts.name}: {reason}")
    return found


def _forbids(facts: GpuFacts) -> str | None:
    if facts.lost:
        return "it does not answer"
    fatal = [xid for xid in facts.xids if xid not in APPLICATION_XIDS and xid not in NOTED_XIDS]
    if fatal:
        return f"XID {fatal[0]}"
    if facts.recovery in RECOVERIES:
        return f"its driver asks for {RECOVERIES[facts.recovery]}"
    if facts.remap_failed:
        return "a bad row of its memory could not be remapped"
    if facts.temperature_c is not None and facts.ends_c is not None and facts.temperature_c >= facts.ends_c:
        return f"it has {facts.temperature_c} C, and switches itself off at {facts.ends_c}"
    return None


def _worries(facts: GpuFacts) -> str | None:
    noted = [xid for xid in facts.xids if xid in NOTED_XIDS]
    if noted:
        return f"XID {noted[0]}"
    if facts.remap_pending:
        return "rows of its memory wait for a reset to be remapped"
    if facts.pages_pending:
        return "pages of its memory wait for a reboot to be retired"
    if facts.uncorrected:
        return f"{facts.uncorrected} uncorrected ECC errors since its driver was loaded"
    if facts.recovery == DRAIN_P2P:
        return "its driver asks to end traffic between GPUs"
    if facts.temperature_c is not None and facts.slows_c is not None and facts.temperature_c >= facts.slows_c:
        return f"it has {facts.temperature_c} C, and slows down from {facts.slows_c} on"
    return None
