"""A 128-bit checksum that a CPU and a device compute with the same operations.

It shows whether bytes verified on the host arrived in the device's memory. Each block of 1 MiB has two sums of its
32-bit words. Each word is multiplied by an odd 64-bit key of its position, modulo 2^64. This is multilinear hashing
(Carter and Wegman 1979; Lemire and Kaser 2013), which a device computes at memory speed. A BLAKE3 digest over the sums
of all blocks binds their order, number and total length.

A change within one word is always detected. Any other change is missed with a probability of 2^-64, unless it was made
for these keys. The keys are not secret: the chunks' BLAKE3 digests protect against attackers.
"""

from functools import lru_cache
from typing import Final

import torch
from blake3 import blake3

BLOCK_BYTES: Final = 1 << 20
_WORDS: Final = BLOCK_BYTES // 4
_KEYS: Final = b"kelvin device checksum 1"


def block_count(nbytes: int) -> int:
    """Return the number of blocks of `nbytes` bytes. The last block may be shorter."""
    return -(-nbytes // BLOCK_BYTES)


@lru_cache(maxsize=8)
def block_keys(device: torch.device) -> torch.Tensor:
    """Return the keys on the device: int64, (2, words of a block). They take 4 MiB and are made once per device."""
    raw = bytearray(blake3(_KEYS).digest(length=2 * _WORDS * 8))
    # Odd, so that no change of a single word becomes a multiple of 2^64.
    return (torch.frombuffer(raw, dtype=torch.int64) | 1).view(2, _WORDS).to(device)


def sum_blocks(data: torch.Tensor, sums: torch.Tensor) -> None:
    """Write the sums of `data` to `sums`: int64, (blocks, 2). `data` is uint8, whole words from a block's start."""
    words, keys = data.view(torch.int32), block_keys(data.device)
    whole_blocks = words.numel() // _WORDS
    body, tail = words[: whole_blocks * _WORDS].view(whole_blocks, _WORDS), words[whole_blocks * _WORDS :]
    for key_row in range(2):
        if whole_blocks:
            torch.sum(body * keys[key_row], dim=1, out=sums[:whole_blocks, key_row])
        if tail.numel():
            sums[whole_blocks, key_row] = torch.sum(tail * keys[key_row, : tail.numel()])


def checksum_of_sums(sums: torch.Tensor, nbytes: int) -> str:
    """Return the checksum of `nbytes` bytes from all their sums: 32 hex digits."""
    raw = sums.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return blake3(nbytes.to_bytes(8, "little") + raw).hexdigest()[:32]


def block_sums(data: memoryview) -> torch.Tensor:
    """Return the sums of bytes in this process's memory, writable or not: int64, (blocks, 2)."""
    sums = torch.zeros((block_count(data.nbytes), 2), dtype=torch.int64)
    buffer = bytearray(BLOCK_BYTES)  # torch takes no read-only buffer
    buffer_tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    for block in range(sums.shape[0]):
        piece = data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        buffer[: piece.nbytes] = piece
        sum_blocks(buffer_tensor[: piece.nbytes], sums[block : block + 1])
    return sums


def checksum_of(data: memoryview) -> str:
    """Return the checksum of `data`: 32 hex digits."""
    return checksum_of_sums(block_sums(data), data.nbytes)
