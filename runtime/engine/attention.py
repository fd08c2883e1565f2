"""A forward over a model and its KV pool: where attention layers meet the pool, and whose piece fails if it raises.

One function is registered with transformers, and there is one backend per model. The backend hangs on the attention
modules themselves, not on keyword arguments (some architectures drop those) nor on a global (two engines in a process
would share it).
"""

import logging
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from runtime.engine.batch import Batch, Piece, build

ATTENTION: Final = "kelvin"
_BACKEND: Final = "kelvin_backend"
_log = logging.getLogger(__name__)


class AttentionBackend(Protocol):
    """Owns the KV pool of every layer. Single-threaded, but `attended_s` may be read from any thread."""

    attended_s: float  # CLOCK_MONOTONIC, when the last layer began its attention; 0 before the first

    def begin(self, batch: Batch) -> None:
        """Prepare what all layers of the coming forward share."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Write this batch's keys and values, attend each sequence to its own.

        query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, H, Dv]. Causal; with a `window` a token
        sees itself and the `window - 1` before it.
        """
        ...


def register() -> None:
    """Make `attn_implementation="kelvin"` known. Idempotent. It stays out of the mask interface on purpose: then no
    mask is built, and `attention_mask` is None."""
    AttentionInterface.register(ATTENTION, _attention)


def attach(module: nn.Module, backend: AttentionBackend) -> None:
    """Let every attention layer of `module` use `backend`."""
    for child in module.modules():
        if hasattr(child, "layer_idx"):
            setattr(child, _BACKEND, backend)


def detach(module: nn.Module) -> None:
    """Undo `attach`: nothing of the backend, its KV pool included, hangs on `module` any more."""
    for child in module.modules():
        if hasattr(child, _BACKEND):
            delattr(child, _BACKEND)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    # The gate refuses models that need any of these; a wrong answer must stay impossible where the gate was not asked.
    if attention_mask is not None or softcap is not None or s_aux is not None:
        raise ValueError("this attention has no mask, softcap or sinks")
    backend: AttentionBackend = getattr(module, _BACKEND)
    backend.attended_s = time.monotonic()
    layer: int = module.layer_idx  # type: ignore[assignment]
    return backend.attend(layer, query, key, value, scaling, sliding_window), None


class DeviceLost(Exception):
    """The device reports an error that outlives the call: nothing computed in this process can be trusted."""


class ModelRunner:
    """One model and its KV pool."""

    def __init__(self, module: nn.Module, backend: AttentionBackend, device: torch.device) -> None:
        attach(module, backend)
        self._module = module
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
