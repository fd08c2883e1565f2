"""Reference attention, and a stand-in for torch's `varlen_attn` that runs on any device.

Follows `torch.nn.attention.varlen.varlen_attn` (documentation of 2.13, flash-attention's meaning of windows): rows of
all sequences one after another, cumulative lengths in int32, causal where the right window is 0 and aligned at the end
of the keys, a left window that counts tokens besides the row's own.
"""

from itertools import pairwise

import torch

from kelvin.contracts.artifacts.runtime_control import GateFacts
from runtime.drivers.native.batch import FlatBatch, SequenceSlice, build_batch, slots_in_blocks
from runtime.drivers.native.kv_blocks_policy import blocks_for
from runtime.drivers.native.model_runner import BatchBackend

FACTS = GateFacts(
    architecture="LlamaForCausalLM",
    dtype="float32",
    layers=2,
    kv_heads=2,
    head_dim=8,
    value_dim=8,
    vocab_size=97,
    max_positions=512,
    kv_bytes_per_token=2 * 2 * 16 * 4,
    first_use=(),
)
HEADS = 4


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """q [n, H, D] are the last n of the L tokens of k, v [L, Hkv, D] -> [n, H, Dv]."""
    length, count = k.shape[0], q.shape[0]
    rep = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    for row in range(count):
        position = length - count + row
        for column in range(length):
            if column > position or (window is not None and column <= position - window):
                scores[:, row, column] = -torch.inf
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double()).to(q.dtype)


def reference_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute what `varlen_attn` would."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert scale is not None
    assert window_size[1] == 0, "only causal"
    assert enable_gqa == (query.shape[1] != key.shape[1])
    q_ends, k_ends = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert q_ends[-1] == query.shape[0]
    assert k_ends[-1] == key.shape[0] == value.shape[0]
    assert max_q == max(b - a for a, b in pairwise(q_ends))
    assert max_k == max(b - a for a, b in pairwise(k_ends))
    window = None if window_size[0] < 0 else window_size[0] + 1
    return torch.cat(
        [
            naive(query[qa:qb], key[ka:kb], value[ka:kb], scale, window)
            for (qa, qb), (ka, kb) in zip(pairwise(q_ends), pairwise(k_ends), strict=True)
        ]
    )


class Replay:
    """Feeds sequences to a backend in pieces, and computes the reference result."""

    def __init__(self, lengths: list[int], device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)

        def random(heads: int, length: int) -> torch.Tensor:
            return torch.randn(length, heads, FACTS.head_dim, generator=generator).to(device, dtype)

        self.device = device
        self.q = [random(HEADS, length) for length in lengths]
        self.k = [random(FACTS.kv_heads, length) for length in lengths]
        self.v = [random(FACTS.kv_heads, length) for length in lengths]
        self.blocks = 0
        self.slots = []
        for length in lengths:  # every other block, so that a sequence is never contiguous
            count = blocks_for(length)
            self.slots.append(slots_in_blocks([self.blocks + 2 * i for i in range(count)], device))
            self.blocks += 2 * count

    def step(
        self, backend: BatchBackend, shares: list[tuple[int, int, int]], window: int | None, layer: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step. `shares` are (sequence, start, count). Return the backend's result and the reference; [T, H, D]
        each."""
        pieces = [SequenceSlice((0,) * count, start, self.slots[i], 1) for i, start, count in shares]
        batch: FlatBatch = build_batch(pieces, self.device)

        def gather(tensors: list[torch.Tensor]) -> torch.Tensor:  # [1, heads, T, D], as a model's layer has it
            return torch.cat([tensors[i][start : start + n] for i, start, n in shares]).transpose(0, 1)[None]

        backend.begin(batch)
        got = backend.attend(layer, gather(self.q), gather(self.k), gather(self.v), 0.3, window)
        want = [
            naive(self.q[i][start : start + n], self.k[i][: start + n], self.v[i][: start + n], 0.3, window)
            for i, start, n in shares
        ]
        return got[0], torch.cat(want)


STEPS = (  # whole and cut prompts, a one-token prompt, decodes beside prefill, a lone decode
    [(0, 0, 40), (1, 0, 7), (2, 0, 1)],
    [(0, 40, 1), (2, 1, 1), (1, 7, 13)],
    [(1, 20, 1), (0, 41, 1), (2, 2, 30)],
    [(1, 21, 1)],
)
LENGTHS = [42, 22, 32]
