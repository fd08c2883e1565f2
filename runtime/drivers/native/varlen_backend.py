"""Attention by one variable-length flash call per layer, over a token-major paged pool. The CUDA backend.

Each step gathers the sequences' keys and values by slot and passes them with cumulative lengths. Every version of
`varlen_attn` with grouped queries accepts that. Its block tables are not used, because split-KV with a block table
leaves rows unwritten in some versions (pytorch#194167). No float32, no softcap, no sinks, and no device before Ampere.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch

from kelvin.contracts.artifacts.runtime_control import GateFacts
from runtime.drivers.native.batch import FlatBatch
from runtime.drivers.native.kv_blocks_policy import BLOCK_SIZE

VarlenAttention = Callable[..., torch.Tensor]
_NEEDED = frozenset({"cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size", "enable_gqa"})
_MAX_HEAD_DIM = 256
_HEAD_DIM_STEP = 8  # the kernel refuses other widths; SDPA pads them
_AMPERE = (8, 0)  # the kernel refuses older devices at its first call


def find_varlen() -> VarlenAttention | None:
    """Return torch's `varlen_attn`, or None if this torch's version lacks arguments that are needed here."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return cast(VarlenAttention, varlen_attn) if supports_needed_arguments(varlen_attn) else None


def supports_needed_arguments(function: Callable[..., object]) -> bool:
    """Return whether the signature has them. The API is young: grouped queries and windows came one by one."""
    return set(inspect.signature(function).parameters) >= _NEEDED


def supports_model(facts: GateFacts, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Return whether the kernel supports this model's attention on a device of that compute capability."""
    fits = facts.head_dim <= _MAX_HEAD_DIM and not facts.head_dim % _HEAD_DIM_STEP and facts.value_dim == facts.head_dim
    return fits and dtype != torch.float32 and capability >= _AMPERE


@dataclass(frozen=True, slots=True)
class VarlenIndex:
    """The sequence boundaries of a batch. Lengths are int32 on the device. The maxima are plain numbers, because
    reading them back would stall the device.
    """

    cu_q: torch.Tensor  # [N + 1]
    cu_k: torch.Tensor  # [N + 1]
    max_q: int
    max_k: int
    gather: torch.Tensor  # int64 [sum of lengths]: slots of all sequences, one after another


def build_index(batch: FlatBatch, device: torch.device) -> VarlenIndex:
    """Return the index of a batch. It is built once per step and shared by all layers."""
    q_lengths = [rows.count for rows in batch.slice_rows]
    k_lengths = [rows.past_tokens + rows.count for rows in batch.slice_rows]
    ends = [list(accumulate(lengths, initial=0)) for lengths in (q_lengths, k_lengths)]
    host = torch.tensor(ends, dtype=torch.int32, pin_memory=device.type == "cuda")
    cumulative = host.to(device, non_blocking=True)
    return VarlenIndex(
        cu_q=cumulative[0],
        cu_k=cumulative[1],
        max_q=max(q_lengths),
        max_k=max(k_lengths),
        gather=torch.cat([rows.slots for rows in batch.slice_rows]),
    )


class VarlenBackend:
    """The flash backend and its pool: per layer keys [blocks, block, Hkv, D] and values [blocks, block, Hkv, Dv]."""

    last_layer_started_s = 0.0

    def __init__(
        self,
        facts: GateFacts,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        varlen: VarlenAttention,
    ) -> None:
        shape = (blocks, BLOCK_SIZE, facts.kv_heads)
        self._keys = [torch.empty(*shape, facts.head_dim, dtype=dtype, device=device) for _ in range(facts.layers)]
        self._values = [torch.empty(*shape, facts.value_dim, dtype=dtype, device=device) for _ in range(facts.layers)]
        self._device = device
        self._varlen = varlen
        self._batch: FlatBatch | None = None
        self._index: VarlenIndex | None = None

    def begin(self, batch: FlatBatch) -> None:
        """Start a forward. Its layers share lengths and slots."""
        self._batch, self._index = batch, build_index(batch, self._device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attend as `AttentionBackend.attend` specifies."""
        batch, index = self._batch, self._index
        assert batch is not None, "begin comes first"
        assert index is not None, "begin comes first"
        keys, values = self._keys[layer].flatten(0, 1), self._values[layer].flatten(0, 1)  # views [slots, Hkv, D]
        keys.index_copy_(0, batch.slot_map, key[0].transpose(0, 1))
        values.index_copy_(0, batch.slot_map, value[0].transpose(0, 1))
        out = self._varlen(
            query[0].transpose(0, 1),
            keys.index_select(0, index.gather),
            values.index_select(0, index.gather),
            index.cu_q,
            index.cu_k,
            index.max_q,
            index.max_k,
            scale=scaling,
            # (left, right) neighbours, aligned at the end of the keys. Only our `window` counts the row itself.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[None]
