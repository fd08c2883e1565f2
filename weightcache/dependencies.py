"""What the cache agent depends on. A test takes each away."""

from typing import Final

from kelvin.blobstore.retrying_store import DEFAULT_BUDGET
from kelvin.contracts.dependency import Dependency

STORE: Final = Dependency(
    "store",
    "one attempt at a range of a pack, and more for its bytes at 1 MiB/s",
    DEFAULT_BUDGET.attempt_s,
    "four attempts, with drawn pauses; so many reads at once as `KELVIN_STORE_READS` says",
    "what another node, NVMe or memory has starts; else the start fails with `unavailable`",
    "kelvin_restore_failures_total",
)
NEWS: Final = Dependency(
    "news",
    "the store's word on who signed a version that is here already",
    1.0,
    "none: once for each start",
    "what was kept beside the bytes counts",
    "kelvin_unverified_versions_total",
)
PEERS: Final = Dependency(
    "peers",
    "a connection to another node, TLS included",
    3.0,
    "left alone for 2 s, doubling to 60 s",
    "the store is asked",
    "kelvin_peers",
)
PEER_ANSWERS: Final = Dependency(
    "peers' answers",
    "what another node has, and silence within a chunk that it sends",
    5.0,
    "likewise; wrong bytes put it aside for 60 s",
    "likewise, for what is missing of a chunk",
    "kelvin_peers",
)

DEPENDENCIES: Final = (STORE, NEWS, PEERS, PEER_ANSWERS)
