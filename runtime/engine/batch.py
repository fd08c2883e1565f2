"""One step's tokens as tensors: the flattened batch that a forward takes, and where each sequence lies in it.

How attention uses it is the backends' work; which pieces are in it, the scheduler's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence, the first at position `start`. Logits are taken of its last `logits`.

    `slots` (int64, on the device, at least start + len(tokens)) says where the KV of each position lies.
    """

    tokens: tuple[int, ...]
    start: int
    slots: torch.Tensor
    logits: int


@dataclass(frozen=True, slots=True)
class Span:
    """A piece's place in the batch: rows [begin, begin + count), with `past` tokens before them in the pool."""

    begin: int
    count: int
    past: int
    slots: torch.Tensor  # int64 [past + count]

    @property
    def end(self) -> int:
        """The row after its last."""
        return self.begin + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows. Tensors are int64 on the device."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    slot_map: torch.Tensor  # [T]: where each row's KV goes
    logits_rows: torch.Tensor  # [R]
    spans: tuple[Span, ...]


def build(pieces: Sequence[Piece], device: torch.device) -> Batch:
    """Flatten `pieces` in order. One copy to the device, from pinned memory where there is a CUDA device."""
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    spans: list[Span] = []
    for piece in pieces:
        begin, count = len(ids), len(piece.tokens)
        ids.extend(piece.tokens)
        positions.extend(range(piece.start, piece.start + count))
        rows.extend(range(begin + count - piece.logits, begin + count))
        spans.append(Span(begin, count, piece.start, piece.slots[: piece.start + count]))
    host = torch.tensor(ids + positions + rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    on_device = host.to(device, non_blocking=True)
    total = len(ids)
    return Batch(
        input_ids=on_device[None, :total],
        position_ids=on_device[None, total : 2 * total],
        slot_map=torch.cat([span.slots[span.past :] for span in spans]),
        logits_rows=on_device[2 * total :],
        spans=tuple(spans),
    )
