"""On a device the arena holds the lease's bytes, and the ring's buffers never overtake one another."""

from pathlib import Path

import pytest
import torch

from contracts.manifest import PAGE
from tests.weightcache.kit import make_version, running, settings_of
from weightcache.device import PinnedRing, copy_to_device
from weightcache.tensors import tensors

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: there is none here")


@pytest.mark.gpu
@needs_device
def test_copy_to_device(tmp_path: Path) -> None:
    """Tensors on the device equal those of the mapping, after many turns of a small ring, and outlive the lease."""
    version = make_version(seed=1, pages=(300, 7, 90), chunk_pages=64)
    device = torch.device("cuda")
    ring = PinnedRing(device, slot_bytes=16 * PAGE, slots=2)
    with running(settings_of(tmp_path)) as agent:
        agent.publish(version)
        with agent.acquire(version) as lease:
            weights = copy_to_device(lease, device, ring)
            expected = {name: tensor.clone() for name, tensor in tensors(lease).items()}
    for name, tensor in expected.items():
        assert weights.tensors[name].device.type == "cuda"
        assert torch.equal(weights.tensors[name].cpu().view(torch.uint8), tensor.view(torch.uint8))
    assert bytes(weights.arena.cpu().tolist()) == version.linear
