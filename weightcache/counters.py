"""The agent's counters since its start, for operators and for tests. Only the event loop writes them."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field


def _by_tier_and_kind() -> defaultdict[str, Counter[str]]:
    return defaultdict(Counter)


@dataclass(slots=True)
class Counters:
    """Counters of the agent. Faults count by tier, then by kind (`ReadOutcome` in `sources/policy/healing.py`)."""

    chunk_reads: Counter[str] = field(default_factory=Counter)
    bytes_read: Counter[str] = field(default_factory=Counter)
    chunk_faults: defaultdict[str, Counter[str]] = field(default_factory=_by_tier_and_kind)
    manifest_faults: defaultdict[str, Counter[str]] = field(default_factory=_by_tier_and_kind)
    attestation_faults: defaultdict[str, Counter[str]] = field(default_factory=_by_tier_and_kind)
    unverified_versions: int = 0  # versions without a trusted signature, started or refused
    healed_chunks: Counter[str] = field(default_factory=Counter)  # by the tier that had a good copy
    healed_manifests: Counter[str] = field(default_factory=Counter)
    refused_chunks: Counter[str] = field(default_factory=Counter)  # by the failure's code
    admitted_chunks: int = 0
    unadmitted_chunks: int = 0
    unkept_chunks: int = 0  # dropped before they were written, because their memory was needed
    hedges: int = 0  # hedged reads of the store
    hedges_won: int = 0  # hedged reads whose second attempt was faster
    prefetched: int = 0
    prefetches_gave_way: int = 0  # interrupted by a lease, to continue after it
    prefetches_failed: Counter[str] = field(default_factory=Counter)  # by the failure's code
    examined_chunks: Counter[str] = field(default_factory=Counter)  # copies that were verified again, by tier
    scrub_passes: int = 0  # complete passes of the scrubber
    strangers: int = 0  # connections of other users, or of another PID namespace
    leases_granted: int = 0
    leases_hot: int = 0
    leases_refused: Counter[str] = field(default_factory=Counter)
    peer_sent_chunks: int = 0  # responses to other nodes: whole chunks or ranges
    peer_sent_bytes: int = 0
    peer_refusals: int = 0  # requests and connections of other nodes that were over a limit
    peer_cuts: int = 0  # responses that were aborted: the client was too slow or left
    peer_strangers: int = 0  # failed TLS handshakes: no certificate of a node, no TLS, a timeout

    def count_read(self, tier: str, length: int) -> None:
        """Count a read of `length` bytes from `tier`. A faulty copy counts with its full length. Callers leave out
        reads of sources that had no copy or did not answer.
        """
        self.chunk_reads[tier] += 1
        self.bytes_read[tier] += length


def plain(faults: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return faults by tier and kind, as sent over the wire."""
    return {tier: {str(kind): count for kind, count in kinds.items()} for tier, kinds in faults.items()}
