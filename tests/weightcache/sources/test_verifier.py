"""The verdict on a read: unverified bytes are compared, and a faulty copy is counted and quarantined once."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from weightcache.counters import Counters
from weightcache.sources.policy.fair_read_queue import ChunkCountLimit
from weightcache.sources.policy.healing import FAULTS, ReadOutcome
from weightcache.sources.source import UNLIMITED_READ_SLOT, ReadSlot, is_digest_of
from weightcache.sources.verifier import Tags, Verifier

RIGHT = b"verified, byte by byte"
DIGEST = blake3(RIGHT).hexdigest()
TAGS = Tags()
NAME, OTHER = "0f" * 32, "f0" * 32


class QuarantiningSource:
    """A source that is never read, and records quarantined chunks."""

    tier = "nvme"
    attempts = 1
    read_limit = ChunkCountLimit(1)

    def __init__(self) -> None:
        self.aside: list[tuple[str, str]] = []

    def may_have(self, tenant: str, digest: str) -> bool:
        return True

    async def fetch(
        self, tenant: str, digest: str, into: memoryview, slot: ReadSlot = UNLIMITED_READ_SLOT
    ) -> ReadOutcome:
        raise AssertionError("the verifier reads no source")

    async def quarantine(self, tenant: str, digest: str) -> None:
        self.aside.append((tenant, digest))


@pytest.mark.parametrize(
    ("read", "data", "want"),
    [
        pytest.param(ReadOutcome.WHOLE, RIGHT, ReadOutcome.WHOLE, id="the digest's bytes"),
        pytest.param(ReadOutcome.WHOLE, RIGHT[:-1] + b"!", ReadOutcome.DIGEST, id="other bytes"),
        pytest.param(ReadOutcome.VERIFIED, b"not looked at", ReadOutcome.VERIFIED, id="compared by the reader"),
        pytest.param(ReadOutcome.ABSENT, b"", ReadOutcome.ABSENT, id="no copy is no fault"),
        pytest.param(ReadOutcome.AWAY, b"", ReadOutcome.AWAY, id="no answer is no fault"),
        *(pytest.param(fault, RIGHT, fault, id=f"a fault of the read: {fault}") for fault in sorted(FAULTS)),
    ],
)
def test_fault_is_counted_and_quarantined_once(read: ReadOutcome, data: bytes, want: ReadOutcome) -> None:
    """A fault is counted and its copy quarantined once. Other outcomes are neither."""
    source, counters = QuarantiningSource(), Counters()

    async def main() -> ReadOutcome:
        with ThreadPoolExecutor(1) as threads:
            verifier = Verifier(threads, is_digest_of, counters)
            return await verifier.verify_read(source, read, "acme", DIGEST, memoryview(data))

    assert asyncio.run(main()) is want
    assert source.aside == ([("acme", DIGEST)] if want in FAULTS else [])
    assert counters.chunk_faults["nvme"] == ({want: 1} if want in FAULTS else {})


@given(st.binary(min_size=1, max_size=4096), st.data())
def test_only_the_same_bytes_match(data: bytes, draw: st.DataObject) -> None:
    """A flipped bit, a shorter or longer end, or another name makes the tag differ."""
    tag = TAGS.compute_tag(memoryview(data), NAME)
    assert len(tag) == 16
    assert TAGS.matches(memoryview(bytes(data)), NAME, tag)
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert not TAGS.matches(memoryview(flipped), NAME, tag)
    assert not TAGS.matches(memoryview(data)[:-1], NAME, tag)
    assert not TAGS.matches(memoryview(data + b"\0"), NAME, tag)
    assert not TAGS.matches(memoryview(data), OTHER, tag)


def test_tags_of_another_key_do_not_match() -> None:
    """Each process has its own key, so a stored tag would be worthless."""
    data = memoryview(b"weights")
    assert not Tags().matches(data, NAME, TAGS.compute_tag(data, NAME))
