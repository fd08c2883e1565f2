"""The attention that is registered with transformers, and the backend that computes it.

One function is registered with transformers, and there is one backend per model. The backend hangs on the attention
modules themselves, not on keyword arguments (some architectures drop those) nor on a global (two engines in a process
would share it).
"""

import time
from typing import Any, Final, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

ATTENTION: Final = "kelvin"
_BACKEND: Final = "kelvin_backend"


class AttentionBackend(Protocol):
    """Owns the KV pool of every layer. Single-threaded, but `attended_s` may be read from any thread."""

    attended_s: float  # CLOCK_MONOTONIC, when the last layer began its attention; 0 before the first

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


def register_attention() -> None:
    """Make `attn_implementation="kelvin"` known. Idempotent. It stays out of the mask interface on purpose: then no
    mask is built, and `attention_mask` is None."""
    AttentionInterface.register(ATTENTION, _attention)


def attach_backend(module: nn.Module, backend: AttentionBackend) -> None:
    """Let every attention layer of `module` use `backend`."""
    for child in module.modules():
        if hasattr(child, "layer_idx"):
            setattr(child, _BACKEND, backend)


def detach_backend(module: nn.Module) -> None:
    """Undo `attach_backend`: nothing of the backend, its KV pool included, hangs on `module` any more."""
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
