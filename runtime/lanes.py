"""The way to this process's device: made while the process is parked, or by its first restore if that comes sooner.

Page-locking memory and a first use of CUDA take longer than many a restore. Only forked processes get here: the zygote
never touches a device.
"""

from collections.abc import Callable

import torch

from weightcache.device import CudaLane, Lane


class Lanes:
    """One lane per device, kept for the process's life."""

    def __init__(
        self,
        make: Callable[[torch.device], Lane] = CudaLane,
        count: Callable[[], int] = torch.cuda.device_count,  # by NVML where torch finds it: makes no context
    ) -> None:
        self._make = make
        self._count = count
        self._lanes: dict[torch.device, Lane] = {}

    @property
    def has_device(self) -> bool:
        """Whether this machine has one."""
        return self._count() > 0

    def prepare(self) -> None:
        """A step of a parked standby's warm-up."""
        if self.has_device:
            self.to(torch.device("cuda", 0))

    def to(self, device: torch.device) -> Lane:
        """The lane to the device."""
        if device not in self._lanes:
            self._lanes[device] = self._make(device)
        return self._lanes[device]
