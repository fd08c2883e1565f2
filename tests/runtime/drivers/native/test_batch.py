"""The flattened batch: every row's id, position and slot, and each piece's place in it."""

import torch

from runtime.drivers.native.batch import SequenceSlice, build_batch, slots_in_blocks
from tests.runtime.tiny_decoders import CPU


def test_build() -> None:
    """A decode, a part of a prompt without logits, and a probe with all logits are flattened."""
    decode = SequenceSlice((7,), 17, slots_in_blocks((3, 1), CPU), 1)
    middle = SequenceSlice((8, 9, 10), 4, slots_in_blocks((2,), CPU), 0)
    probe = SequenceSlice((1, 2), 0, slots_in_blocks((5,), CPU), 2)
    batch = build_batch([decode, middle, probe], CPU)
    assert batch.input_ids.tolist() == [[7, 8, 9, 10, 1, 2]]
    assert batch.position_ids.tolist() == [[17, 4, 5, 6, 0, 1]]
    assert batch.slot_map.tolist() == [16 + 1, 32 + 4, 32 + 5, 32 + 6, 80, 81]
    assert batch.logits_rows.tolist() == [0, 4, 5]
    assert [(span.begin, span.end, span.past_tokens) for span in batch.slice_rows] == [(0, 1, 17), (1, 4, 4), (4, 6, 0)]
    assert batch.slice_rows[0].slots.tolist() == [*range(48, 64), 16, 17]


def test_slots_follow_the_blocks() -> None:
    """Position i lies in block i // 16, wherever that is."""
    slots = slots_in_blocks((4, 2), CPU)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [*range(64, 80), *range(32, 48)]
