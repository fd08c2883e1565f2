"""A hundred corruptions on disk: each request gets the right text or the right error.

`test_control_unverified_bytes_give_other_text` shows what would be served without verification.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.https_client import Answer, complete
from tests.e2e.installation_state import cache, chunks, pack_rows, sole_rows
from tests.e2e.tiny_models import greedy_continuation, prompt_of, text_of

pytestmark = pytest.mark.deep

IDS = [8, 12, 15]
TOKENS = 4
HEALED_ROUNDS, HEALED_AT_ONCE = 5, 17
REFUSED = 15

Damage = Callable[[bytes, bytes, bytes, random.Random], bytes]


def flip(right: bytes, other: bytes, older: bytes, source: random.Random) -> bytes:
    data = bytearray(right)
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(data)


def zero(right: bytes, other: bytes, older: bytes, source: random.Random) -> bytes:
    return bytes(len(right))


def swap(right: bytes, other: bytes, older: bytes, source: random.Random) -> bytes:
    return other


def stale(right: bytes, other: bytes, older: bytes, source: random.Random) -> bytes:
    return older[: len(right)]


def truncate(right: bytes, other: bytes, older: bytes, source: random.Random) -> bytes:
    return right[: source.randrange(len(right))]


def lengthen(right: bytes, other: bytes, older: bytes, source: random.Random) -> bytes:
    return right + bytes(4096)


KEEP_LENGTH: Sequence[Damage] = (flip, zero, swap, stale)
ALL: Sequence[Damage] = (*KEEP_LENGTH, truncate, lengthen)


class Ground:
    """A model at zero with all chunks on NVMe, most of them in one pack, and its right bytes by digest."""

    def __init__(self, kelvin: Installation) -> None:
        self.kelvin = kelvin
        packs = pack_rows(kelvin, "llama")
        self.pack, rows = sole_rows(kelvin, "llama")
        self.whole = self.pack.read_bytes()
        self.offsets = {digest: offset for digest, offset, _ in rows}
        self.right = {
            digest: pack.read_bytes()[offset : offset + length]
            for pack, found in packs.items()
            for digest, offset, length in found
        }
        self.longest = max(len(body) for body in self.right.values())
        self.digests = sorted(digest for digest in self.offsets if len(self.right[digest]) == self.longest)
        other = min(pack_rows(kelvin, "qwen2").keys() - packs.keys())
        self.older = other.read_bytes()[: self.longest]

    def ask(self) -> tuple[int, str]:
        """Return the status, and the text or error, of a request that the open breaker did not refuse."""
        found: list[Answer] = []

        def is_tried() -> bool:
            found[:] = [complete(self.kelvin, "llama", prompt_of(IDS), max_tokens=TOKENS)]
            return b'"breaker_open"' not in found[0].raw

        self.kelvin.wait(is_tried, "its start is tried")
        return found[0].status, found[0].text.strip() if found[0].status == 200 else found[0].raw.decode()

    def rest(self) -> None:
        """Go to zero with empty host memory, and wait until each chunk is on NVMe again."""
        self.kelvin.empty_tier("host")
        self.kelvin.wait(lambda: all(self.file(digest).exists() for digest in self.right), "all is on NVMe")

    def file(self, digest: str) -> Path:
        return self.kelvin.data / "cache" / "default" / digest[:2] / digest

    def damaged(self, digest: str, damage: Damage, source: random.Random) -> bytes:
        other = source.choice([each for each in self.digests if each != digest])
        bad = damage(self.right[digest], self.right[other], self.older, source)
        assert bad != self.right[digest]
        return bad

    def faults(self, tier: str) -> int:
        return sum(cache(self.kelvin)["chunk_faults"].get(tier, {}).values())

    def write_pack(self, digest: str, body: bytes) -> None:
        with self.pack.open("r+b") as pack:
            pack.seek(self.offsets[digest])
            pack.write(body)


@pytest.fixture
def ground(kelvin: Installation) -> Iterator[Ground]:
    """The model, restored after the test."""
    assert complete(kelvin, "llama", "w5", max_tokens=1).status == 200
    ground = Ground(kelvin)
    ground.pack.chmod(0o600)
    ground.rest()
    yield ground
    ground.pack.write_bytes(ground.whole)
    kelvin.empty_tier("host")
    kelvin.wait(lambda: ground.ask()[0] == 200, "it serves again")


def test_a_hundred_corruptions(ground: Ground, llama: Path) -> None:
    """Damage on NVMe is healed during the request and counted. Damage in the store too is refused by name."""
    assert HEALED_ROUNDS * HEALED_AT_ONCE + REFUSED >= 100
    assert set(chunks(ground.kelvin, "llama")) == set(ground.right)
    source, right = random.Random(3), text_of(llama, greedy_continuation(llama, IDS, TOKENS))
    for _ in range(HEALED_ROUNDS):
        before, bad = ground.faults("nvme"), source.sample(ground.digests, HEALED_AT_ONCE)
        for number, digest in enumerate(bad):
            ground.file(digest).write_bytes(ground.damaged(digest, ALL[number % len(ALL)], source))
        assert ground.ask() == (200, right)
        assert ground.faults("nvme") - before == len(bad)
        ground.rest()
    for number, digest in enumerate(source.sample(ground.digests, REFUSED)):
        damage = KEEP_LENGTH[number % len(KEEP_LENGTH)]
        ground.file(digest).write_bytes(ground.damaged(digest, source.choice(ALL), source))
        ground.write_pack(digest, ground.damaged(digest, damage, source))
        status, text = ground.ask()
        assert (status, "chunk_corrupt" in text, digest in text) == (500, True, True), text
        ground.write_pack(digest, ground.right[digest])
        assert not ground.file(digest).exists(), "a chunk without a good copy is not cached"
        ground.kelvin.empty_tier("host")
    assert ground.ask() == (200, right)
