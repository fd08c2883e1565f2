"""Live sequences, and the flattened batch: one step's tokens as tensors.

The scheduler chooses the tokens; the attention backends use the batch.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kelvin.contracts.serving.stream_frames import Counts
from runtime.drivers.interface import GenerationRequest
from runtime.drivers.native.kv_blocks_policy import BLOCK_SIZE, blocks_for, worst_case_tokens
from runtime.drivers.schedule_policy import SequenceState


class LiveSequence:
    """A request in the engine. Its first `computed_tokens` tokens have KV. It holds its blocks from start to end."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.computed_tokens = 0
        self.device_us = 0
        self.blocks: tuple[int, ...] = ()
        self.slots = torch.empty(0, dtype=torch.int64)
        # Sampling uses one uniform draw per token, so a seed gives the same tokens in any batch.
        self._draws = random.Random(request.sampling.seed)  # noqa: S311

    def __repr__(self) -> str:
        return f"<LiveSequence {self.request.request_id} computed={self.computed_tokens}/{len(self.tokens)}>"

    @property
    def state(self) -> SequenceState:
        """Return the state that the scheduler needs."""
        return SequenceState(len(self.tokens), self.computed_tokens, self.request.tenant)

    @property
    def generated_tokens(self) -> int:
        """Return how many tokens were generated."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def max_blocks(self) -> int:
        """Return how many KV blocks it needs in the worst case."""
        return blocks_for(worst_case_tokens(len(self.request.prompt_ids), self.request.sampling.max_tokens))

    @property
    def counts(self) -> Counts:
        """Return the cumulative cost. Of the prompt, only computed tokens count."""
        return Counts(
            prompt_tokens=min(self.computed_tokens, len(self.request.prompt_ids)),
            completion_tokens=self.generated_tokens,
            device_us=self.device_us,
        )

    def draw(self) -> float:
        """Return the next uniform number in [0, 1)."""
        return self._draws.random()

    def assign_blocks(self, blocks: tuple[int, ...], device: torch.device) -> None:
        """Assign KV blocks. `slots[i]` is then the pool slot of token i's KV."""
        self.blocks = blocks
        self.slots = slots_in_blocks(blocks, device)


def slots_in_blocks(blocks: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the slot of each token position, int64 [len(blocks) * BLOCK_SIZE]."""
    first = torch.tensor(blocks, dtype=torch.int64) * BLOCK_SIZE
    return (first[:, None] + torch.arange(BLOCK_SIZE)).flatten().to(device)


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Consecutive tokens of one sequence, from position `start`. Logits are computed for the last `logit_count`.

    `slots` (int64, on the device, at least start + len(tokens)) has the pool slot of each position.
    """

    tokens: tuple[int, ...]
    start: int
    slots: torch.Tensor
    logit_count: int


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of one slice in the batch: [begin, begin + count), after `past_tokens` tokens in the pool."""

    begin: int
    count: int
    past_tokens: int
    slots: torch.Tensor  # int64 [past + count]

    @property
    def end(self) -> int:
        """Return the index after the last row."""
        return self.begin + self.count


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch of T rows. Tensors are int64 on the device."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    slot_map: torch.Tensor  # [T]: the pool slot of each row's KV
    logits_rows: torch.Tensor  # [R]
    slice_rows: tuple[BatchRows, ...]


def build_batch(slices: Sequence[SequenceSlice], device: torch.device) -> FlatBatch:
    """Flatten `slices` in order. Makes one copy to the device, from pinned memory for CUDA."""
    ids: list[int] = []
    positions: list[int] = []
    logits_rows: list[int] = []
    slice_rows: list[BatchRows] = []
    for row_slice in slices:
        begin, count = len(ids), len(row_slice.tokens)
        ids.extend(row_slice.tokens)
        positions.extend(range(row_slice.start, row_slice.start + count))
        logits_rows.extend(range(begin + count - row_slice.logit_count, begin + count))
        slice_rows.append(BatchRows(begin, count, row_slice.start, row_slice.slots[: row_slice.start + count]))
    host = torch.tensor(ids + positions + logits_rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    on_device = host.to(device, non_blocking=True)
    total = len(ids)
    return FlatBatch(
        input_ids=on_device[None, :total],
        position_ids=on_device[None, total : 2 * total],
        slot_map=torch.cat([rows.slots[rows.past_tokens :] for rows in slice_rows]),
        logits_rows=on_device[2 * total :],
        slice_rows=tuple(slice_rows),
    )
