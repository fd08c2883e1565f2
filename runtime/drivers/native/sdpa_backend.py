"""Attention by one SDPA call per sequence, over a head-major pool. The CPU's backend, and the reference on any device.

For a single query row, heads that share a key head are packed into one matrix, because `enable_gqa` and repeated keys
are 5-7 times slower. Longer slices expand the keys instead.
Gathering a sequence's blocks costs no more than a contiguous pool. (Measured on a CPU in bfloat16.)
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
    """The SDPA backend and its pool: per layer keys [Hkv, slots, D] and values [Hkv, slots, Dv].

    Pages are touched at their first write. They are small pages, because a block has a part under each head. With huge
    pages (a kernel's `always`) the first sequence would touch nearly the whole pool.
    """

    last_layer_started_s = 0.0

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
        """Start a forward. Its layers share the masks."""
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
        """Attend as `AttentionBackend.attend` specifies."""
        batch = self._batch
        assert batch is not None, "begin comes first"
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(1, batch.slot_map, key[0])
        values.index_copy_(1, batch.slot_map, value[0])
        heads, row_count, kv_heads = query.shape[1], query.shape[2], key.shape[1]
        out = query.new_empty(1, row_count, heads, value.shape[-1])
        for rows in batch.slice_rows:
            q = query[0, :, rows.begin : rows.end].view(kv_heads, heads // kv_heads, rows.count, -1)
            if rows.past_tokens == 0:
                k, v = key[0, :, rows.begin : rows.end], value[0, :, rows.begin : rows.end]
            else:
                visible = _visible_slots(rows, window)
                k, v = keys.index_select(1, visible), values.index_select(1, visible)
            if rows.count == 1:
                # All query heads of a key head are the rows of one small matrix: no mask, no repeated keys.
                packed = sdpa(q.transpose(1, 2), k[:, None], v[:, None], scale=scaling)  # [Hkv, 1, rep, Dv]
                out[0, rows.begin] = packed.flatten(0, 2)
            else:
                out[0, rows.begin : rows.end] = self._prefill(q, k, v, scaling, window).flatten(0, 1).transpose(0, 1)
        return out

    def _prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        """Attend [Hkv, rep, n, D] to [Hkv, L, D]; the last n of the L keys belong to the queries."""
        rep, count, length = q.shape[1], q.shape[2], k.shape[1]
        k, v = k[:, None].expand(-1, rep, -1, -1), v[:, None].expand(-1, rep, -1, -1)
        if count == length and (window is None or length <= window):
            return sdpa(q, k, v, is_causal=True, scale=scaling)
        # `is_causal` aligns the mask at the upper left, which is wrong with history.
        mask = self._masks.get((count, length, window))
        if mask is None:
            mask = _lower_right_mask(count, length, window, q.device)
            self._masks[count, length, window] = mask
        return sdpa(q, k, v, attn_mask=mask, scale=scaling)


def _keep_small(address: int, nbytes: int) -> None:
    """Keep the kernel from using huge pages for the whole pages of this range."""
    begin, end = -(-address // PAGE) * PAGE, (address + nbytes) // PAGE * PAGE
    if end > begin:
        with suppress(OSError):  # a kernel without huge pages
            libc.advise(begin, end - begin, libc.MADV_NOHUGEPAGE)


def _visible_slots(rows: BatchRows, window: int | None) -> torch.Tensor:
    """Return the slots of the tokens that at least one of the rows sees."""
    return rows.slots if window is None else rows.slots[max(0, rows.past_tokens + 1 - window) :]


def _lower_right_mask(count: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a mask that is True where row i of the last `count` of `length` tokens sees token j."""
    row = torch.arange(length - count, length, device=device)[:, None]
    column = torch.arange(length, device=device)
    seen = column <= row
    return seen if window is None else seen & (column > row - window)
