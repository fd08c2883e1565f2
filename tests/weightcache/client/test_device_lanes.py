"""A parked process has its way to a device ready, where there is one; on others nothing of a device is touched."""

import torch

from tests.weightcache.client.lanes import LateLane
from weightcache.client.device_copy import Lane, Lanes

DEVICE = torch.device("cuda", 0)


class Makes:
    """Counts lanes."""

    def __init__(self) -> None:
        self.made: list[torch.device] = []

    def __call__(self, device: torch.device) -> Lane:
        self.made.append(device)
        return LateLane()


def test_made_while_it_parks() -> None:
    """The restore finds it made, and the next one the same."""
    makes = Makes()
    lanes = Lanes(makes, lambda: 1)
    assert lanes.has_device
    lanes.prepare()
    assert makes.made == [DEVICE]
    assert lanes.lane_for(DEVICE) is lanes.lane_for(DEVICE)
    assert makes.made == [DEVICE]


def test_without_a_device() -> None:
    """Where there is none nothing is made, until a restore asks for it."""
    makes = Makes()
    lanes = Lanes(makes, lambda: 0)
    assert not lanes.has_device
    lanes.prepare()
    assert makes.made == []
    lanes.lane_for(DEVICE)
    assert makes.made == [DEVICE]


def test_preparing_lanes_never_fails() -> None:
    """This machine's own answer: preparing never fails, and uses CUDA only where a device is."""
    if torch.cuda.device_count() == 0:
        Lanes().prepare()
        assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
