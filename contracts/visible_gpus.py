"""Which GPUs of a machine CUDA shows to a process. Pure; who lists them, as they all are, is `service/nvml.py`.

Source: NVIDIA, "CUDA C++ Programming Guide", CUDA environment variables.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_NUMBER: Final = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Listed:
    """A GPU in the order of the PCI bus. None is what it doesn't say."""

    uuid: str | None  # with its GPU-
    product: str | None
    is_parted: bool = False  # by MIG


@dataclass(frozen=True, slots=True)
class Shown:
    """What a process was told: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, None where not set."""

    devices: str | None = None
    order: str | None = None


def visible(listed: Sequence[Listed], shown: Shown) -> tuple[int, ...]:
    """Places in the list. All of them where it can't be told: one too many is better than one that is missed."""
    every = tuple(range(len(listed)))
    found: set[int] = set()
    for name in () if shown.devices is None else shown.devices.split(","):
        if _NUMBER.fullmatch(name := name.strip()):
            if not _counts_so(listed, shown.order):
                return every
            if not 0 <= int(name) < len(listed):
                break  # CUDA, too, passes over what comes after it
            found.add(int(name))
        else:
            fitting = _beginning(listed, name)
            if len(fitting) != 1:
                return every
            found.add(fitting[0])
    return tuple(sorted(found)) or every


def _counts_so(listed: Sequence[Listed], order: str | None) -> bool:
    """Whether CUDA's numbers are places in the list: by itself it puts the fastest first, and counts parts by MIG."""
    products = {each.product for each in listed}
    is_alike = len(products) == 1 and None not in products
    return (order == "PCI_BUS_ID" or is_alike) and not any(each.is_parted for each in listed)


def _beginning(listed: Sequence[Listed], name: str) -> list[int]:
    """A UUID may be cut short, as long as it is still one device's."""
    return [
        place for place, each in enumerate(listed) if name.startswith("GPU-") and (each.uuid or "").startswith(name)
    ]
