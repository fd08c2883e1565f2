"""The SDPA backend equals the reference attention for every mix of pieces and windows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.drivers.native.sdpa_backend import SdpaBackend
from tests.runtime.drivers.native.backends import FACTS, LENGTHS, STEPS, Replay
from tests.runtime.driving import run_to_end
from tests.runtime.tiny_decoders import CPU, engine, greedy, prompts, reference, tokens_of


@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
def test_sdpa_matches_plain_attention(window: int | None) -> None:
    """Whole prompts, chunks with history and decodes in scattered blocks, with short and long windows."""
    replay = Replay(LENGTHS, CPU, torch.float32)
    backend = SdpaBackend(FACTS, replay.blocks, torch.float32, CPU)
    for shares in STEPS:
        got, want = replay.step(backend, shares, window)
        torch.testing.assert_close(got, want)


def test_layers_are_apart() -> None:
    replay = Replay(LENGTHS, CPU, torch.float32)
    backend = SdpaBackend(FACTS, replay.blocks, torch.float32, CPU)
    for layer in (0, 1):
        replay.step(backend, STEPS[0], None, layer)
    backend._keys[1].zero_()
    for layer, close in ((0, True), (1, False)):
        got, want = replay.step(backend, STEPS[1], None, layer)
        assert torch.allclose(got, want, atol=1e-5) == close


def flags_at(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that holds the address (`VmFlags` of proc(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_a_pool_is_never_of_huge_pages() -> None:
    """A block has a piece under each head, so with huge pages a short sequence would take most of the pool."""
    other = torch.empty(8 << 20, dtype=torch.uint8)  # control: other memory has no such flag
    backend = SdpaBackend(FACTS, 4096, torch.float32, CPU)
    for pool in (*backend._keys, *backend._values):
        assert "nh" in flags_at(pool.data_ptr() + pool.nbytes // 2)
    assert "nh" not in flags_at(other.data_ptr() + other.nbytes // 2)


def test_masks_are_made_once_per_step() -> None:
    """All layers of a step share a mask, and the next step makes new ones."""
    replay = Replay(LENGTHS, CPU, torch.float32)
    backend = SdpaBackend(FACTS, replay.blocks, torch.float32, CPU)
    replay.step(backend, STEPS[0], None)
    replay.step(backend, STEPS[1], None)
    assert list(backend._masks) == [(13, 20, None)]
    replay.step(backend, STEPS[3], None)
    assert not backend._masks


@pytest.mark.parametrize("name", ["qwen2 with windows", "mistral", "gemma3"])
def test_a_forgotten_window_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without windows, a prompt longer than the window goes wrong."""
    attend = SdpaBackend.attend

    def without_window(
        self: SdpaBackend, layer: int, q: Any, k: Any, v: Any, scaling: float, window: int | None
    ) -> torch.Tensor:
        return attend(self, layer, q, k, v, scaling, None)

    monkeypatch.setattr(SdpaBackend, "attend", without_window)
    machine = engine(name)
    assert machine.admit(greedy("a", prompts()[7])) is None
    assert tokens_of(run_to_end(machine), "a") != reference(name, prompts()[7])
