"""What the engine remembers of one request: its tokens, its KV blocks, its draws and its cost."""

import random
from collections.abc import Sequence

import torch

from contracts.frames import Counts
from runtime.engine.interface import GenerationRequest
from runtime.policy.blocks import BLOCK_SIZE, blocks_for, worst_case_tokens
from runtime.policy.schedule import Progress


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
    def progress(self) -> Progress:
        """What the scheduler needs to know."""
        return Progress(len(self.tokens), self.computed, self.request.tenant)

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

    def hold(self, blocks: tuple[int, ...], device: torch.device) -> None:
        """Take `blocks`; `slots[i]` is then where token i's KV lies."""
        self.blocks = blocks
        self.slots = slots_of(blocks, device)


def slots_of(blocks: Sequence[int], device: torch.device) -> torch.Tensor:
    """Slot of each token position, int64 [len(blocks) * BLOCK_SIZE]."""
    first = torch.tensor(blocks, dtype=torch.int64) * BLOCK_SIZE
    return (first[:, None] + torch.arange(BLOCK_SIZE)).flatten().to(device)
