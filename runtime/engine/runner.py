"""Run pieces through the model in one forward, and find out which of them is at fault when it raises."""

import logging
from collections.abc import Sequence

import torch

from runtime.binding import BoundModel
from runtime.engine.attention import AttentionBackend, attach
from runtime.engine.batch import Piece, build

_log = logging.getLogger(__name__)


class DeviceLost(Exception):
    """The device reports an error that outlives the call: nothing computed in this process can be trusted."""


class ModelRunner:
    """One model and its KV pool."""

    def __init__(self, bound: BoundModel, backend: AttentionBackend, device: torch.device) -> None:
        attach(bound.module, backend)
        self._module = bound.module
        self._backend = backend
        self._device = device

    @property
    def progressed_s(self) -> float:
        """See `interface.Engine`."""
        return self._backend.attended_s

    def run(self, pieces: Sequence[Piece]) -> list[torch.Tensor | None]:
        """Logits [piece.logits, V] of each piece; None for one that raised, alone too.

        A forward that raises is repeated piece by piece: what it wrote to the pool is written again, the same. Raises
        DeviceLost.
        """
        try:
            return list(self._forward(pieces))
        except torch.AcceleratorError as error:
            raise DeviceLost from error
        except Exception:
            if len(pieces) == 1:
                _log.exception("a forward of one piece failed")
                return [None]
            _log.warning("a forward of %d pieces failed; repeating them one by one", len(pieces), exc_info=True)
            return [self.run([piece])[0] for piece in pieces]

    @torch.inference_mode()
    def _forward(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, ...]:
        batch = build(pieces, self._device)
        self._backend.begin(batch)
        answer = self._module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logits_rows,
        )
        logits: torch.Tensor = answer.logits[0]
        return torch.split(logits, [piece.logits for piece in pieces])
