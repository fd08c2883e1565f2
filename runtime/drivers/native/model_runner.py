"""Run a model's forward over a batch and its KV pool. If a forward raises, find the slice that fails."""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from runtime.drivers.native.batch import FlatBatch, SequenceSlice, build_batch
from runtime.models.attention_hook import AttentionBackend, attach_backend

log = logging.getLogger(__name__)


class BatchBackend(AttentionBackend, Protocol):
    """An attention backend that receives each batch before its forward."""

    def begin(self, batch: FlatBatch) -> None:
        """Prepare what all layers of the next forward share."""
        ...


class DeviceLost(Exception):
    """A device error that outlives the call: no later result in this process can be trusted."""


class ModelRunner:
    """The forward of one model over its KV pool."""

    def __init__(self, module: nn.Module, backend: BatchBackend, device: torch.device) -> None:
        attach_backend(module, backend)
        self._module = module
        self._backend = backend
        self._device = device

    @property
    def last_layer_started_s(self) -> float:
        """Return when the last attention layer began, in CLOCK_MONOTONIC seconds."""
        return self._backend.last_layer_started_s

    def run(self, slices: Sequence[SequenceSlice]) -> list[torch.Tensor | None]:
        """Return the logits [row_slice.logit_count, V] of each slice, or None for a slice that raises even alone.

        A forward that raises is repeated slice by slice, which writes the same values to the pool again. Raises
        DeviceLost.
        """
        try:
            return list(self._forward(slices))
        except torch.AcceleratorError as error:
            raise DeviceLost from error
        except Exception:
            if len(slices) == 1:
                log.exception("a forward of one slice failed")
                return [None]
            log.warning("a forward of %d slices failed; repeating them one by one", len(slices), exc_info=True)
            return [self.run([row_slice])[0] for row_slice in slices]

    @torch.inference_mode()
    def _forward(self, slices: Sequence[SequenceSlice]) -> tuple[torch.Tensor, ...]:
        batch = build_batch(slices, self._device)
        self._backend.begin(batch)
        answer = self._module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logits_rows,
        )
        logits: torch.Tensor = answer.logits[0]
        return torch.split(logits, [row_slice.logit_count for row_slice in slices])
