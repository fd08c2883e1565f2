"""Live sequences, and one step's tokens of them as tensors: the flattened batch that a forward takes.

How attention uses it is the backends' work; which pieces are in it, the scheduler's.
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
    """`tokens` are prompt and generated; the first `computed` of them have KV. Blocks are held from entry to end."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.computed = 0
        self.device_us = 0
        self.blocks: tuple[int, ...] = ()
        self.slots = torch.empty(0, dtype=torch.int64)
        # One uniform draw per token is all that sampling takes, so a seed means the same tokens in any company.
        self._draws = random.Random(request.sampling.seed)  # noqa: S311

    def __repr__(self) -> str:
        return f"<LiveSequence {self.request.request_id} computed={self.computed}/{len(self.tokens)}>"

    @property
    def progress(self) -> SequenceState:
        """What the scheduler needs to know."""
        return SequenceState(len(self.tokens), self.computed, self.request.tenant)

    @property
    def generated(self) -> int:
        """Tokens handed out."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def blocks_max(self) -> int:
        """Return how many KV blocks it may come to need."""
        return blocks_for(worst_case_tokens(len(self.request.prompt_ids), self.request.sampling.max_tokens))

    @property
    def counts(self) -> Counts:
        """Cumulative cost so far; of the prompt only what was computed."""
        return Counts(
            prompt_tokens=min(self.computed, len(self.request.prompt_ids)),
            completion_tokens=self.generated,
            device_us=self.device_us,
        )

    def draw(self) -> float:
        """The next uniform number in [0, 1)."""
        return self._draws.random()

    def assign_blocks(self, blocks: tuple[int, ...], device: torch.device) -> None:
        """Take `blocks`; `slots[i]` is then where token i's KV lies."""
        self.blocks = blocks
        self.slots = slots_in_blocks(blocks, device)


def slots_in_blocks(blocks: Sequence[int], device: torch.device) -> torch.Tensor:
    """Slot of each token position, int64 [len(blocks) * BLOCK_SIZE]."""
    first = torch.tensor(blocks, dtype=torch.int64) * BLOCK_SIZE
    return (first[:, None] + torch.arange(BLOCK_SIZE)).flatten().to(device)


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Consecutive tokens of one sequence, the first at position `start`. Logits are taken of its last `logits`.

    `slots` (int64, on the device, at least start + len(tokens)) says where the KV of each position lies.
    """

    tokens: tuple[int, ...]
    start: int
    slots: torch.Tensor
    logits: int


@dataclass(frozen=True, slots=True)
class BatchRows:
    """A piece's place in the batch: rows [begin, begin + count), with `past_tokens` tokens before them in the pool."""

    begin: int
    count: int
    past_tokens: int
    slots: torch.Tensor  # int64 [past + count]

    @property
    def end(self) -> int:
        """The row after its last."""
        return self.begin + self.count


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """T rows. Tensors are int64 on the device."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    slot_map: torch.Tensor  # [T]: where each row's KV goes
    logits_rows: torch.Tensor  # [R]
    spans: tuple[BatchRows, ...]


def build_batch(slices: Sequence[SequenceSlice], device: torch.device) -> FlatBatch:
    """Flatten `slices` in order. One copy to the device, from pinned memory where there is a CUDA device."""
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    spans: list[BatchRows] = []
    for piece in slices:
        begin, count = len(ids), len(piece.tokens)
        ids.extend(piece.tokens)
        positions.extend(range(piece.start, piece.start + count))
        rows.extend(range(begin + count - piece.logits, begin + count))
        spans.append(BatchRows(begin, count, piece.start, piece.slots[: piece.start + count]))
    host = torch.tensor(ids + positions + rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    on_device = host.to(device, non_blocking=True)
    total = len(ids)
    return FlatBatch(
        input_ids=on_device[None, :total],
        position_ids=on_device[None, total : 2 * total],
        slot_map=torch.cat([span.slots[span.past_tokens :] for span in spans]),
        logits_rows=on_device[2 * total :],
        spans=tuple(spans),
    )
