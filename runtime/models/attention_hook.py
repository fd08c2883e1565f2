"""Connect transformers' attention to our backends.

One function is registered with transformers, and there is one backend per model. The backend is an attribute of the
attention modules. It is no keyword argument, because some architectures drop those, and no global, because two engines
in a process would share it.
"""

import time
from typing import Any, Final, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

ATTENTION: Final = "kelvin"
_BACKEND: Final = "kelvin_backend"


class AttentionBackend(Protocol):
    """The owner of all layers' KV pools. Single-threaded, except that any thread may read `last_layer_started_s`."""

    last_layer_started_s: float  # when the last layer began its attention, CLOCK_MONOTONIC; 0 before the first

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Store this batch's keys and values, and let each sequence attend to its own.

        query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, H, Dv]. Causal; with a `window` a token
        sees itself and the `window - 1` tokens before it.
        """
        ...


def register_attention() -> None:
    """Register `attn_implementation="kelvin"`. Idempotent. It is not registered for masks, so that transformers builds
    none and `attention_mask` is None.
    """
    AttentionInterface.register(ATTENTION, _attention)


def attach_backend(module: nn.Module, backend: AttentionBackend) -> None:
    """Set the backend that every attention layer of `module` uses."""
    for child in module.modules():
        if hasattr(child, "layer_idx"):
            setattr(child, _BACKEND, backend)


def detach_backend(module: nn.Module) -> None:
    """Undo `attach_backend`, so that `module` no longer refers to the backend or its KV pool."""
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
    # The gate refuses models that need any of these. Check again, for models that did not pass the gate.
    if attention_mask is not None or softcap is not None or s_aux is not None:
        raise ValueError("this attention has no mask, softcap or sinks")
    backend: AttentionBackend = getattr(module, _BACKEND)
    backend.last_layer_started_s = time.monotonic()
    layer: int = module.layer_idx  # type: ignore[assignment]
    return backend.attend(layer, query, key, value, scaling, sliding_window), None
