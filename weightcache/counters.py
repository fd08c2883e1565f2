"""What the agent counted since it started, for operators and for tests that count reads. One writer: the event loop."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field


def _by_tier_and_kind() -> defaultdict[str, Counter[str]]:
    return defaultdict(Counter)


@dataclass(slots=True)
class Counters:
    """By tier where the name says so; faults by tier, then by kind (`policy/healing.ReadOutcome`)."""

    chunk_reads: Counter[str] = field(default_factory=Counter)
    bytes_read: Counter[str] = field(default_factory=Counter)
    chunk_faults: defaultdict[str, Counter[str]] = field(default_factory=_by_tier_and_kind)
    manifest_faults: defaultdict[str, Counter[str]] = field(default_factory=_by_tier_and_kind)
    attestation_faults: defaultdict[str, Counter[str]] = field(default_factory=_by_tier_and_kind)
    unverified: int = 0  # versions that came without a trusted signature, started or refused
    healed_chunks: Counter[str] = field(default_factory=Counter)  # by the tier that had a good copy
    healed_manifests: Counter[str] = field(default_factory=Counter)
    refused_chunks: Counter[str] = field(default_factory=Counter)  # by the failure's code
    admitted_chunks: int = 0
    unadmitted_chunks: int = 0
    unkept_chunks: int = 0  # let go before they were written, as their memory was needed
    hedges: int = 0  # reads of the store that were asked a second time
    hedges_won: int = 0  # of those, where the second answer came first
    prefetched: int = 0
    prefetches_gave_way: int = 0  # to a lease, to go on after it
    prefetches_failed: Counter[str] = field(default_factory=Counter)  # by the failure's code
    examined: Counter[str] = field(default_factory=Counter)  # copies that were looked at anew, by tier
    sweeps: int = 0  # over all that is kept
    strangers: int = 0  # connections of other users
    leases_granted: int = 0
    leases_hot: int = 0
    leases_refused: Counter[str] = field(default_factory=Counter)
    peer_sent_chunks: int = 0  # answers to other nodes, whole or the range that was asked for
    peer_sent_bytes: int = 0
    peer_refusals: int = 0  # of other nodes, as too much was under way
    peer_cuts: int = 0  # of those that were too slow, or left
    peer_strangers: int = 0  # connections that were no node's

    def read(self, tier: str, length: int) -> None:
        """A chunk was read from `tier`, whatever it turned out to be."""
        self.chunk_reads[tier] += 1
        self.bytes_read[tier] += length


def plain(faults: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Faults by tier and kind, as they go over the wire."""
    return {tier: {str(kind): count for kind, count in kinds.items()} for tier, kinds in faults.items()}
