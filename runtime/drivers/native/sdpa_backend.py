"""Attention by one SDPA call per sequence, over a head-major pool. The CPU's backend, and the reference on any device.

Measured on a CPU in bfloat16: query heads that share a key head are packed into one call, because `enable_gqa` and
repeated keys are 5-7 times slower; gathering a sequence's blocks costs nothing against a contiguous pool.
"""

import mmap
from contextlib import suppress
from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kelvin.contracts.artifacts.runtime_control import GateFacts
from runtime.drivers.native.batch import BatchRows, FlatBatch
from runtime.drivers.native.kv_blocks_policy import BLOCK_SIZE
from weightcache.client import libc

PAGE: Final = mmap.PAGESIZE


class SdpaBackend:
    """Pool: per layer keys [Hkv, slots, D] and values [Hkv, slots, Dv]; pages are touched when first written.

    Small pages: a block has a piece under each head, so that with huge ones (a kernel's `always`) the first sequence
    would have nearly all of the pool zeroed, and kept.
    """

    attended_s = 0.0

    def __init__(self, facts: GateFacts, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        slots = blocks * BLOCK_SIZE
        self._keys = [self._pool(facts.kv_heads, slots, facts.head_dim, dtype, device) for _ in range(facts.layers)]
        self._values = [self._pool(facts.kv_heads, slots, facts.value_dim, dtype, device) for _ in range(facts.layers)]
        self._batch: FlatBatch | None = None
        self._masks: dict[tuple[int, int, int | None], torch.Tensor] = {}

    @staticmethod
    def _pool(heads: int, slots: int, dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        pool = torch.empty(heads, slots, dim, dtype=dtype, device=device)
        if device.type == "cpu":
            _keep_small(pool.data_ptr(), pool.nbytes)
        return pool

    def begin(self, batch: FlatBatch) -> None:
        """Masks are shared by the layers of one forward."""
        self._batch = batch
        self._masks.clear()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        batch = self._batch
        assert batch is not None, "begin comes first"
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(1, batch.slot_map, key[0])
        values.index_copy_(1, batch.slot_map, value[0])
        heads, rows, kv_heads = query.shape[1], query.shape[2], key.shape[1]
        out = query.new_empty(1, rows, heads, value.shape[-1])
        for span in batch.spans:
            q = query[0, :, span.begin : span.end].view(kv_heads, heads // kv_heads, span.count, -1)
            if span.past_tokens == 0:
                k, v = key[0, :, span.begin : span.end], value[0, :, span.begin : span.end]
            else:
                seen = _visible(span, window)
                k, v = keys.index_select(1, seen), values.index_select(1, seen)
            if span.count == 1:
                # All query heads of a key head are the rows of one small matrix: no mask, no repeated keys.
                packed = sdpa(q.transpose(1, 2), k[:, None], v[:, None], scale=scaling)  # [Hkv, 1, rep, Dv]
                out[0, span.begin] = packed.flatten(0, 2)
            else:
                out[0, span.begin : span.end] = self._prefill(q, k, v, scaling, window).flatten(0, 1).transpose(0, 1)
        return out

    def _prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        """[Hkv, rep, n, D] against [Hkv, L, D], of which the last n are its own."""
        rep, count, length = q.shape[1], q.shape[2], k.shape[1]
        k, v = k[:, None].expand(-1, rep, -1, -1), v[:, None].expand(-1, rep, -1, -1)
        if count == length and (window is None or length <= window):
            return sdpa(q, k, v, is_causal=True, scale=scaling)
        # `is_causal` is upper-left: with history it would be wrong.
        mask = self._masks.get((count, length, window))
        if mask is None:
            mask = _lower_right_mask(count, length, window, q.device)
            self._masks[count, length, window] = mask
        return sdpa(q, k, v, attn_mask=mask, scale=scaling)


def _keep_small(address: int, nbytes: int) -> None:
    """Never huge pages for the whole pages of this range."""
    begin, end = -(-address // PAGE) * PAGE, (address + nbytes) // PAGE * PAGE
    if end > begin:
        with suppress(OSError):  # a kernel that has no huge pages
            libc.advise(begin, end - begin, libc.MADV_NOHUGEPAGE)


def _visible(span: BatchRows, window: int | None) -> torch.Tensor:
    """Slots of the tokens that some row of the span sees."""
    return span.slots if window is None else span.slots[max(0, span.past_tokens + 1 - window) :]


def _lower_right_mask(count: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where row i of the last `count` of `length` tokens sees token j."""
    row = torch.arange(length - count, length, device=device)[:, None]
    column = torch.arange(length, device=device)
    seen = column <= row
    return seen if window is None else seen & (column > row - window)
