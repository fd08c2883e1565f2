"""A parked process prepares its lane if the machine has a device. Without a device it does not touch CUDA."""

import torch

from tests.weightcache.client.lanes import LateLane
from weightcache.client.device_copy import Lane, Lanes

DEVICE = torch.device("cuda", 0)


class Makes:
    """A factory that records the lanes it makes."""

    def __init__(self) -> None:
        self.made: list[torch.device] = []

    def __call__(self, device: torch.device) -> Lane:
        self.made.append(device)
        return LateLane()


def test_lane_is_made_while_parked() -> None:
    """The lane is made while the process parks, and every restore uses the same one."""
    factory = Makes()
    lanes = Lanes(factory, lambda: 1)
    assert lanes.has_device
    lanes.prepare()
    assert factory.made == [DEVICE]
    assert lanes.lane_for(DEVICE) is lanes.lane_for(DEVICE)
    assert factory.made == [DEVICE]


def test_without_a_device() -> None:
    """Without a device no lane is made until a restore asks for one."""
    factory = Makes()
    lanes = Lanes(factory, lambda: 0)
    assert not lanes.has_device
    lanes.prepare()
    assert factory.made == []
    lanes.lane_for(DEVICE)
    assert factory.made == [DEVICE]


def test_preparing_lanes_never_fails() -> None:
    """Preparing does not fail on this machine, and without a device it does not initialize CUDA."""
    if torch.cuda.device_count() == 0:
        Lanes().prepare()
        assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
