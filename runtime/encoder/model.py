"""An encoder over verified tensors: sequences in, vectors out, as sentence-transformers computes them.

One padded forward for a batch, then pooling over the tokens that are there. Which sequences share one is the engine's.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import normalize

from runtime.binding import BoundModel
from runtime.encoder.recipe import Pooling, Recipe


class EncoderModel:
    """One model and its recipe on one device."""

    def __init__(self, bound: BoundModel, recipe: Recipe, device: torch.device) -> None:
        self._module = bound.module
        self._recipe = recipe
        self._device = device
        self._pad = bound.config.pad_token_id or 0

    @torch.inference_mode()
    def embed(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Vectors [n, dimensions], float32 on the CPU. Padding is masked: a sequence's vector is its own."""
        longest = max(map(len, sequences))
        ids = [[*sequence, *[self._pad] * (longest - len(sequence))] for sequence in sequences]
        there = [[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences]
        both = torch.tensor([ids, there], dtype=torch.int64).to(self._device)
        hidden = self._module(input_ids=both[0], attention_mask=both[1]).last_hidden_state
        vectors = pool(hidden, both[1], self._recipe.pooling)
        if self._recipe.normalize:
            vectors = normalize(vectors, p=2, dim=1)
        return vectors.float().cpu()


def pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """hidden [n, L, H], mask [n, L] of 0 and 1 -> [n, H], in the dtype of `hidden`; sums are made in float32."""
    if pooling == "cls":
        return hidden[:, 0]
    there = mask[:, :, None].to(hidden.dtype)
    if pooling == "max":
        return hidden.masked_fill(there == 0, -torch.inf).amax(1)
    total = (hidden * there).sum(1, dtype=torch.float32)
    count = there.sum(1, dtype=torch.float32)
    return (total / (count if pooling == "mean" else count.sqrt())).to(hidden.dtype)
