"""Dependencies of the cache agent. A test takes each away."""

from typing import Final

from kelvin.blobstore.retrying_store import DEFAULT_BUDGET
from kelvin.contracts.dependency import Dependency

STORE: Final = Dependency(
    "store",
    "one attempt at a range of a pack, and more for its bytes at 1 MiB/s",
    DEFAULT_BUDGET.attempt_s,
    "four attempts, with random pauses; at most `KELVIN_STORE_READS` ranges at once, without hedges",
    "versions in memory, on NVMe or at another node start; other starts fail with `unavailable`",
    "kelvin_restore_failures_total",
)
ATTESTATIONS: Final = Dependency(
    "news",
    "the store's signatures of a version that is already here",
    1.0,
    "none: once for each start",
    "the signatures kept with the bytes count",
    "kelvin_unverified_versions_total",
)
PEERS: Final = Dependency(
    "peers",
    "a connection to another node, TLS included",
    3.0,
    "not asked for 2 s, doubling to 60 s",
    "the store is read",
    "kelvin_peers",
)
PEER_ANSWERS: Final = Dependency(
    "peers' answers",
    "another node's list of chunks, and silence within a chunk that it sends",
    5.0,
    "not asked for 2 s, doubling to 60 s; after wrong bytes for 60 s",
    "a cut chunk is resumed once, then read whole from another peer or the store",
    "kelvin_peers",
)

DEPENDENCIES: Final = (STORE, ATTESTATIONS, PEERS, PEER_ANSWERS)
