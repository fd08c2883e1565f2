"""Any change of the bytes between host and device changes the checksum, which the same code computes on both."""

import random
from collections.abc import Callable

import pytest
import torch
from blake3 import blake3

from tests.weightcache.client.lanes import needs_device
from weightcache.client import device_checksum
from weightcache.client.device_checksum import (
    BLOCK_BYTES,
    block_count,
    block_sums,
    checksum_of,
    checksum_of_sums,
    sum_blocks,
)

TOTAL = 3 * BLOCK_BYTES + 3 * 4096
MASK = (1 << 64) - 1


@pytest.fixture(scope="module")
def body() -> bytes:
    return random.Random(7).randbytes(TOTAL)


def flip(data: bytearray) -> None:
    data[2 * BLOCK_BYTES + 77] ^= 1


def flip_the_highest_bits(data: bytearray) -> None:
    """Make two changes that cancel each other in a sum modulo 2^32 and in a sum of whole 64-bit words."""
    data[7] ^= 0x80
    data[15] ^= 0x80


def swap_words(data: bytearray) -> None:
    data[0:4], data[4:8] = data[4:8], data[0:4]


def swap_chunks(data: bytearray) -> None:
    one, two = slice(0, BLOCK_BYTES), slice(BLOCK_BYTES, 2 * BLOCK_BYTES)
    data[one], data[two] = data[two], data[one]


def shift(data: bytearray) -> None:
    data[:] = data[4:] + data[:4]


def truncate(data: bytearray) -> None:
    del data[-4096:]


def lose_the_end(data: bytearray) -> None:
    data[-4096:] = bytes(4096)


def zero_page(data: bytearray) -> None:
    data[BLOCK_BYTES : BLOCK_BYTES + 4096] = bytes(4096)


def zero_all(data: bytearray) -> None:
    data[:] = bytes(len(data))


def repeat_a_block(data: bytearray) -> None:
    data[BLOCK_BYTES : 2 * BLOCK_BYTES] = data[:BLOCK_BYTES]


DAMAGES = [
    flip, flip_the_highest_bits, swap_words, swap_chunks, shift, truncate, lose_the_end, zero_page, zero_all,
    repeat_a_block,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_changes_the_checksum(body: bytes, damage: Callable[[bytearray], None]) -> None:
    data = bytearray(body)
    damage(data)
    assert data != body
    assert checksum_of(memoryview(data)) != checksum_of(memoryview(body))


@pytest.mark.parametrize("damage", [swap_words, swap_chunks, shift])
def test_control_without_positions_misses_moved_bytes(
    body: bytes, damage: Callable[[bytearray], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with one key for all positions, and blocks in any order, moved bytes are not found."""
    monkeypatch.setattr(
        device_checksum, "block_keys", lambda device: torch.ones((2, BLOCK_BYTES // 4), dtype=torch.int64)
    )
    data = bytearray(body)
    damage(data)
    assert int(block_sums(memoryview(data)).sum()) == int(block_sums(memoryview(body)).sum())


def test_checksum_matches_plain_integers(body: bytes) -> None:
    """The sums equal those of plain Python integers, for a full block and for a short one."""
    raw = blake3(b"kelvin device checksum 1").digest(length=2 * BLOCK_BYTES // 4 * 8)
    sums = block_sums(memoryview(body))
    assert sums.shape == (block_count(TOTAL), 2)
    for block in (0, 3):
        data = body[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        for sum_number in range(2):
            total = 0
            for at in range(0, len(data), 4):
                place = sum_number * 2 * BLOCK_BYTES + 2 * at
                key = int.from_bytes(raw[place : place + 8], "little") | 1
                total += key * int.from_bytes(data[at : at + 4], "little", signed=True)
            assert int(sums[block, sum_number]) & MASK == total & MASK


def test_pieces_and_the_whole_agree(body: bytes) -> None:
    """The sums of pieces that begin at blocks equal those of the whole, because copies arrive in pieces."""
    whole = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    sums = torch.zeros((block_count(TOTAL), 2), dtype=torch.int64)
    for begin, end in ((0, 2 * BLOCK_BYTES), (2 * BLOCK_BYTES, TOTAL)):
        sum_blocks(whole[begin:end], sums[begin // BLOCK_BYTES : block_count(end)])
    assert torch.equal(sums, block_sums(memoryview(body)))
    assert checksum_of_sums(sums, TOTAL) == checksum_of(memoryview(body))


def test_checksum_depends_on_length() -> None:
    """The checksum of no bytes exists, and zeros of different lengths differ."""
    assert len(checksum_of(memoryview(b""))) == 32
    assert checksum_of(memoryview(bytes(4096))) != checksum_of(memoryview(bytes(8192)))


@pytest.mark.gpu
@needs_device
def test_device_sums_equal_those_of_the_cpu(body: bytes) -> None:
    """A device computes the same sums as the CPU."""
    device_bytes = torch.frombuffer(bytearray(body), dtype=torch.uint8).cuda()
    sums = torch.zeros((block_count(TOTAL), 2), dtype=torch.int64, device="cuda")
    sum_blocks(device_bytes, sums)
    assert torch.equal(sums.cpu(), block_sums(memoryview(body)))
