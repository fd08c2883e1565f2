"""Judge the health of a GPU, and compute which GPUs CUDA shows to a process.

Pure; `kelvin/devices/nvml.py` reads and lists the GPUs.

Sources: NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors). "GPU Memory Error Management"
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt), on pending and failed row remapping and the recovery action. NVIDIA's
device plugin for Kubernetes (internal/rm/health.go), on which XIDs make a GPU unhealthy: this module agrees with it.
"CUDA C++ Programming Guide", on environment variables.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_NUMBER: Final = re.compile(r"-?[0-9]{1,9}")
# Application errors that leave the device intact. The device plugin ignores them too.
APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
# Reported, but work may continue: a row that will be remapped at the next reset (63), many corrected errors (92), an
# error contained in one process (94), and a changed recovery action (154), which is read separately.
DEGRADING_XIDS: Final = frozenset({63, 92, 94, 154})
# NVML_GPU_RECOVERY_ACTION_*: what the driver requests. Peer-to-peer traffic (3) is absent: a replica uses one device.
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
    """A GPU in PCI bus order. None: the device does not report it."""

    uuid: str | None  # including the prefix GPU-
    product: str | None
    is_parted: bool = False  # divided by MIG


@dataclass(frozen=True, slots=True)
class CudaVisibility:
    """A process's CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. None: not set."""

    devices: str | None = None
    order: str | None = None


def visible_gpus(listed: Sequence[ListedGpu], shown: CudaVisibility) -> tuple[int, ...]:
    """Return indexes into `listed` of the GPUs that CUDA shows. If that is unclear, return all: better one too many."""
    every = tuple(range(len(listed)))
    found: set[int] = set()
    for name in () if shown.devices is None else shown.devices.split(","):
        if _NUMBER.fullmatch(name := name.strip()):
            if not _uses_pci_order(listed, shown.order):
                return every
            if not 0 <= int(name) < len(listed):
                break  # CUDA also ignores everything after it
            found.add(int(name))
        else:
            fitting = _find_by_uuid_prefix(listed, name)
            if len(fitting) != 1:
                return every
            found.add(fitting[0])
    return tuple(sorted(found)) or every


def _uses_pci_order(listed: Sequence[ListedGpu], order: str | None) -> bool:
    """Return whether CUDA's numbers are indexes into `listed`. By default CUDA puts the fastest device first. With MIG
    it counts the parts.
    """
    products = {each.product for each in listed}
    is_alike = len(products) == 1 and None not in products
    return (order == "PCI_BUS_ID" or is_alike) and not any(each.is_parted for each in listed)


def _find_by_uuid_prefix(listed: Sequence[ListedGpu], name: str) -> list[int]:
    """Return the devices that a UUID names. It may be shortened as long as it is unique."""
    return [
        place for place, each in enumerate(listed) if name.startswith("GPU-") and (each.uuid or "").startswith(name)
    ]


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Facts about one device or MIG part. None: not reported, as by a MIG part, a card without ECC, an older driver."""

    name: str  # name of the device
    lost: bool = False  # it no longer answers
    xids: tuple[int, ...] = ()  # distinct XIDs since `open_gpus`
    recovery: int | None = None  # the recovery action that the driver requests
    uncorrected: int | None = None  # ECC errors since the driver was loaded
    uncorrected_ever: int | None = None
    remap_pending: bool | None = None  # rows are remapped at the next reset
    remap_failed: bool | None = None
    pages_pending: bool | None = None  # pages wait for retirement, on devices without remapping
    temperature_c: int | None = None
    slows_c: int | None = None  # temperature at which it slows down
    ends_c: int | None = None  # temperature at which it switches itself off
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class HealthyGpu:
    """No fault is known."""


@dataclass(frozen=True, slots=True)
class DegradedGpu:
    """The GPU still computes correctly, but an operator should look at it."""

    reason: str


@dataclass(frozen=True, slots=True)
class UnhealthyGpu:
    """No replica may stay on this GPU."""

    reason: str


GpuHealth = HealthyGpu | DegradedGpu | UnhealthyGpu


def judge_gpu_health(facts: GpuFacts) -> GpuHealth:
    """Return the health with the first reason found. Reasons that forbid work come before the others."""
    if (reason := _unhealthy_reason(facts)) is not None:
        return UnhealthyGpu(reason)
    if (reason := _degraded_reason(facts)) is not None:
        return DegradedGpu(reason)
    return HealthyGpu()


def worst_gpu_health(devices: Iterable[GpuFacts]) -> GpuHealth:
    """Return the worst health of all devices. The reason names the device."""
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
        return f"its temperature is {facts.temperature_c} °C; it switches itself off at {facts.ends_c}"
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
        return f"its temperature is {facts.temperature_c} °C; it slows down at {facts.slows_c}"
    return None
