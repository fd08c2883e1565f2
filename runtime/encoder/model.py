"""Compute vectors from sequences over verified tensors, as sentence-transformers does.

A batch takes one padded forward, then pooling over the real tokens. The engine chooses the sequences of a batch.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import normalize

from runtime.encoder.recipe import Pooling, Recipe
from runtime.models.binding import BoundModel


class EncoderModel:
    """One model and its recipe on one device."""

    def __init__(self, bound: BoundModel, recipe: Recipe, device: torch.device) -> None:
        self._module = bound.module
        self._recipe = recipe
        self._device = device
        self._pad = bound.config.pad_token_id or 0
        lists = (child for child in self._module.modules() if isinstance(child, nn.ModuleList))
        self._layers = [layer for each in lists for layer in each]
        self.last_layer_started_s = 0.0  # CLOCK_MONOTONIC, when the last layer began; 0 before the first

    @torch.inference_mode()
    def embed(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return vectors [n, dimensions], float32 on the CPU. Padding is masked and has no effect."""
        longest = max(map(len, sequences))
        ids = [[*sequence, *[self._pad] * (longest - len(sequence))] for sequence in sequences]
        mask = [[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences]
        ids_and_mask = torch.tensor([ids, mask], dtype=torch.int64).to(self._device)
        with self._record_progress():
            hidden = self._module(input_ids=ids_and_mask[0], attention_mask=ids_and_mask[1]).last_hidden_state
        vectors = pool(hidden, ids_and_mask[1], self._recipe.pooling)
        if self._recipe.normalize:
            vectors = normalize(vectors, p=2, dim=1)
        return vectors.float().cpu()

    @contextmanager
    def _record_progress(self) -> Iterator[None]:
        """Update `last_layer_started_s`, since a forward over a long text takes minutes on a busy core."""

        def record_time(_module: nn.Module, _inputs: object) -> None:
            self.last_layer_started_s = time.monotonic()

        # Remove the hooks afterwards: they refer to the module, and the cycle would keep its tensors alive.
        hooks = [layer.register_forward_pre_hook(record_time) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Pool hidden [n, L, H] with mask [n, L] of 0 and 1 to [n, H] in the dtype of `hidden`; sums are float32."""
    if pooling == "cls":
        return hidden[:, 0]
    present = mask[:, :, None].to(hidden.dtype)
    if pooling == "max":
        return hidden.masked_fill(present == 0, -torch.inf).amax(1)
    total = (hidden * present).sum(1, dtype=torch.float32)
    count = present.sum(1, dtype=torch.float32)
    return (total / (count if pooling == "mean" else count.sqrt())).to(hidden.dtype)
