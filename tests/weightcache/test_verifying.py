"""What a read is worth: bytes are compared where nobody did, and a faulty copy is counted and set aside once."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from blake3 import blake3

from weightcache.counters import Counters
from weightcache.policy.healing import FAULTS, Outcome
from weightcache.policy.sharing import Limit
from weightcache.sources import ALL_AT_ONCE, Turn, is_digest_of
from weightcache.verifying import Verifier

RIGHT = b"verified, byte by byte"
DIGEST = blake3(RIGHT).hexdigest()


class Shelved:
    """A source that is not read here, and remembers what it must not offer again."""

    tier = "nvme"
    attempts = 1
    room = Limit(1)

    def __init__(self) -> None:
        self.aside: list[tuple[str, str]] = []

    def may_have(self, tenant: str, digest: str) -> bool:
        return True

    async def fetch(self, tenant: str, digest: str, into: memoryview, turn: Turn = ALL_AT_ONCE) -> Outcome:
        raise AssertionError("only what was read is judged")

    async def quarantine(self, tenant: str, digest: str) -> None:
        self.aside.append((tenant, digest))


@pytest.mark.parametrize(
    ("read", "data", "want"),
    [
        pytest.param(Outcome.WHOLE, RIGHT, Outcome.WHOLE, id="the digest's bytes"),
        pytest.param(Outcome.WHOLE, RIGHT[:-1] + b"!", Outcome.DIGEST, id="other bytes"),
        pytest.param(Outcome.VERIFIED, b"not looked at", Outcome.VERIFIED, id="compared by who read them"),
        pytest.param(Outcome.ABSENT, b"", Outcome.ABSENT, id="no copy is no fault"),
        pytest.param(Outcome.AWAY, b"", Outcome.AWAY, id="no answer is no fault"),
        *(pytest.param(fault, RIGHT, fault, id=f"a fault of the read: {fault}") for fault in sorted(FAULTS)),
    ],
)
def test_check(read: Outcome, data: bytes, want: Outcome) -> None:
    """What it came to; a fault leaves its count and a copy that is not offered again, anything else nothing."""
    source, counters = Shelved(), Counters()

    async def main() -> Outcome:
        with ThreadPoolExecutor(1) as threads:
            verifier = Verifier(threads, is_digest_of, counters)
            return await verifier.check(source, read, "acme", DIGEST, memoryview(data))

    assert asyncio.run(main()) is want
    assert source.aside == ([("acme", DIGEST)] if want in FAULTS else [])
    assert counters.chunk_faults["nvme"] == ({want: 1} if want in FAULTS else {})
