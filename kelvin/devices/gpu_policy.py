"""What is known of a GPU, whether work may be left on it, and which GPUs CUDA shows to a process.

Pure; who asks and lists them is `kelvin/devices/nvml.py`.

Sources: NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors); "GPU Memory Error Management"
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt), on pending and failed row remapping and the recovery action; and, for
what a scheduler makes of an XID, NVIDIA's device plugin for Kubernetes (internal/rm/health.go): it and we agree; and,
on environment variables, the "CUDA C++ Programming Guide".
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_NUMBER: Final = re.compile(r"-?[0-9]{1,9}")
# Of an application, and the device is as good as before: what the device plugin passes over.
APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
# Told, and work goes on: a row that will be remapped at the next reset (63), many corrected errors (92), an error that
# was contained in the process that it hit (94), and a change of the recovery action, which is asked for itself (154).
DEGRADING_XIDS: Final = frozenset({63, 92, 94, 154})
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
class ListedGpu:
    """A GPU in the order of the PCI bus. None is what it doesn't say."""

    uuid: str | None  # with its GPU-
    product: str | None
    is_parted: bool = False  # by MIG


@dataclass(frozen=True, slots=True)
class CudaVisibility:
    """What a process was told: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, None where not set."""

    devices: str | None = None
    order: str | None = None


def visible_gpus(listed: Sequence[ListedGpu], shown: CudaVisibility) -> tuple[int, ...]:
    """Places in the list. All of them where it can't be told: one too many is better than one that is missed."""
    every = tuple(range(len(listed)))
    found: set[int] = set()
    for name in () if shown.devices is None else shown.devices.split(","):
        if _NUMBER.fullmatch(name := name.strip()):
            if not _uses_pci_order(listed, shown.order):
                return every
            if not 0 <= int(name) < len(listed):
                break  # CUDA, too, passes over what comes after it
            found.add(int(name))
        else:
            fitting = _find_by_uuid_prefix(listed, name)
            if len(fitting) != 1:
                return every
            found.add(fitting[0])
    return tuple(sorted(found)) or every


def _uses_pci_order(listed: Sequence[ListedGpu], order: str | None) -> bool:
    """Whether CUDA's numbers are places in the list: by itself it puts the fastest first, and counts parts by MIG."""
    products = {each.product for each in listed}
    is_alike = len(products) == 1 and None not in products
    return (order == "PCI_BUS_ID" or is_alike) and not any(each.is_parted for each in listed)


def _find_by_uuid_prefix(listed: Sequence[ListedGpu], name: str) -> list[int]:
    """A UUID may be cut short, as long as it is still one device's."""
    return [
        place for place, each in enumerate(listed) if name.startswith("GPU-") and (each.uuid or "").startswith(name)
    ]


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
class HealthyGpu:
    """Nothing is known against it."""


@dataclass(frozen=True, slots=True)
class DegradedGpu:
    """It computes right, for now: somebody should look at it."""

    reason: str


@dataclass(frozen=True, slots=True)
class UnhealthyGpu:
    """Nothing is to be left on it."""

    reason: str


GpuHealth = HealthyGpu | DegradedGpu | UnhealthyGpu


def judge_gpu_health(facts: GpuFacts) -> GpuHealth:
    """First reason wins, and what forbids work comes before what doesn't."""
    if (reason := _unhealthy_reason(facts)) is not None:
        return UnhealthyGpu(reason)
    if (reason := _degraded_reason(facts)) is not None:
        return DegradedGpu(reason)
    return HealthyGpu()


def worst_gpu_health(devices: Iterable[GpuFacts]) -> GpuHealth:
    """Of all of them; the reason names the device."""
    found: GpuHealth = HealthyGpu()
    for facts in devices:
        match judge_gpu_health(facts):
            case UnhealthyGpu(reason):
                return UnhealthyGpu(f"{facts.name}: {reason}")
            case DegradedGpu(reason) if found == HealthyGpu():
                found = DegradedGpu(f"{facts.name}: {reason}")
    return found


def _unhealthy_reason(facts: GpuFacts) -> str | None:
    if facts.lost:
        return "it does not answer"
    fatal = [xid for xid in facts.xids if xid not in APPLICATION_XIDS and xid not in DEGRADING_XIDS]
    if fatal:
        return f"XID {fatal[0]}"
    if facts.recovery in RECOVERIES:
        return f"its driver asks for {RECOVERIES[facts.recovery]}"
    if facts.remap_failed:
        return "a bad row of its memory could not be remapped"
    if facts.temperature_c is not None and facts.ends_c is not None and facts.temperature_c >= facts.ends_c:
        return f"it has {facts.temperature_c} C, and switches itself off at {facts.ends_c}"
    return None


def _degraded_reason(facts: GpuFacts) -> str | None:
    noted = [xid for xid in facts.xids if xid in DEGRADING_XIDS]
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
