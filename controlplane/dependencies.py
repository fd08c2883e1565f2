"""What the control plane depends on. A test takes each away."""

from typing import Final

from contracts.dependency import Dependency

ZYGOTE: Final = Dependency(
    "zygote",
    "a new standby",
    10.0,
    "as many births at once as standbys lack; looked at again each second",
    "parked standbys take versions; who finds none parked waits 20 s, then `unavailable`",
    "kelvin_standbys",
)
RESTORE: Final = Dependency(
    "restore",
    "a standby that takes a version, until it serves",
    600.0,
    "activators' breakers end the asking; a minimum is tried again each 30 s",
    "callers of that version are told why; others start",
    "kelvin_restore_failures_total",
)
ORDERS: Final = Dependency(
    "orders",
    "telling a replica to drain, or that its memory is wrong",
    5.0,
    "none: once",
    "one that does not listen is ended",
    "kelvin_replicas",
)
REPORTS: Final = Dependency(
    "reports",
    "what a replica says of itself while it drains or parks",
    2.0,
    "none: a drain ends with the first that is missing",
    "likewise",
    "kelvin_replicas",
)
ADOPTION: Final = Dependency(
    "adoption",
    "what a replica of the control plane before says of itself",
    3.0,
    "asked at the start, and each 30 s where its socket is unknown",
    "one that does not answer is killed; a call for its version starts another",
    "kelvin_replicas",
)
SLEEP: Final = Dependency(
    "sleep",
    "a replica that gives back what it does not need while nobody calls",
    10.0,
    "none: once",
    "it serves on, or is ended",
    "kelvin_replicas",
)
SIBLINGS: Final = Dependency(
    "siblings",
    "health, metrics and tiers of the other processes",
    1.0,
    "none: asked when somebody asks",
    "shown as away; starts are forecast by what was measured",
    "kelvin_up",
)
EVICTION: Final = Dependency(
    "eviction",
    "the cache agent dropping what an operator says, and its own state",
    30.0,
    "none",
    "503 `unavailable`; models serve and start",
    "kelvin_up",
)
EXAMINATION: Final = Dependency(
    "examination",
    "the cache agent hashing all that it keeps (`kelvin doctor`)",
    900.0,
    "none",
    "503 `unavailable`; models serve and start",
    "kelvin_up",
)
READERS: Final = Dependency(
    "readers",
    "an activator that takes a line of the feed",
    10.0,
    "its connection is ended; it asks again",
    "it gets all of it anew; what others are told goes on",
    "kelvin_feed_connected",
)
DATABASE: Final = Dependency(
    "database",
    "the lock of `kelvin.db`, where another process holds it",
    5.0,
    "none",
    "what is known serves and wakes; changes are `unavailable`, records wait in their spools",
    "kelvin_spool_backlog_records",
)

CONNECT_S: Final = 1.0  # of a Unix socket that blocks the loop: one that listens takes it at once

DEPENDENCIES: Final = (
    ZYGOTE, RESTORE, ORDERS, REPORTS, ADOPTION, SLEEP, SIBLINGS, EVICTION, EXAMINATION, READERS, DATABASE,
)  # fmt: skip
