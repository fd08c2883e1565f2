"""128 bits over bytes wherever they lie: the same operations on a CPU's tensors and on a device's.

It answers one question: did the bytes that were verified on the host arrive in the device's memory? Each block of 1 MiB
is two sums of its 32-bit words, each word times an odd 64-bit key of its position, modulo 2^64: multilinear hashing
(Carter and Wegman 1979; Lemire and Kaser 2013), which a device does at the rate of its memory. A BLAKE3 digest over
all blocks' sums binds their order, their number and the length. Whatever changes within one word is seen for certain;
any other change that was not made for these keys, with a probability of all but 2^-64. The keys are no secret: against
somebody who means it the chunks' BLAKE3 digests stand.
"""

from functools import lru_cache
from typing import Final

import torch
from blake3 import blake3

BLOCK_BYTES: Final = 1 << 20
_WORDS: Final = BLOCK_BYTES // 4
_KEYS: Final = b"kelvin device checksum 1"


def blocks_of(nbytes: int) -> int:
    """How many blocks so many bytes are; the last may be shorter."""
    return -(-nbytes // BLOCK_BYTES)


@lru_cache(maxsize=8)
def keys_on(device: torch.device) -> torch.Tensor:
    """(2, words of a block) int64 on the device: 4 MiB, made once."""
    raw = bytearray(blake3(_KEYS).digest(length=2 * _WORDS * 8))
    # Odd, so that no change of a single word is a multiple of 2^64.
    return (torch.frombuffer(raw, dtype=torch.int64) | 1).view(2, _WORDS).to(device)


def sum_blocks(data: torch.Tensor, sums: torch.Tensor) -> None:
    """Put the sums of `data` (uint8, whole words, from a block's beginning) into `sums`: (blocks, 2), int64."""
    words, keys = data.view(torch.int32), keys_on(data.device)
    whole = words.numel() // _WORDS
    body, tail = words[: whole * _WORDS].view(whole, _WORDS), words[whole * _WORDS :]
    for way in range(2):
        if whole:
            torch.sum(body * keys[way], dim=1, out=sums[:whole, way])
        if tail.numel():
            sums[whole, way] = torch.sum(tail * keys[way, : tail.numel()])


def fold(sums: torch.Tensor, nbytes: int) -> str:
    """All sums of `nbytes` bytes as 32 hex digits."""
    raw = sums.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return blake3(nbytes.to_bytes(8, "little") + raw).hexdigest()[:32]


def sums_of(data: memoryview) -> torch.Tensor:
    """(blocks, 2) int64 of bytes in this process's memory, read-only ones too."""
    sums = torch.zeros((blocks_of(data.nbytes), 2), dtype=torch.int64)
    into = bytearray(BLOCK_BYTES)  # torch takes no read-only buffer
    scratch = torch.frombuffer(into, dtype=torch.uint8)
    for block in range(sums.shape[0]):
        piece = data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        into[: piece.nbytes] = piece
        sum_blocks(scratch[: piece.nbytes], sums[block : block + 1])
    return sums


def checksum_of(data: memoryview) -> str:
    """32 hex digits."""
    return fold(sums_of(data), data.nbytes)
