"""What the control plane depends on. A test takes each away."""

from typing import Final

from kelvin.contracts.dependency import Dependency

ZYGOTE: Final = Dependency(
    "zygote",
    "a new standby",
    10.0,
    "a birth at once for each start or job that waits, others as cores are spare; 0.1 to 1 s after a failed one",
    "parked standbys take versions; a start that finds none waits 20 s, a job 30 s, then `unavailable`",
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
    "asked again until its time to drain is over; about wrong memory once",
    "it gets no new requests, and is ended then; one whose memory is wrong is killed",
    "kelvin_replicas",
)
REPORTS: Final = Dependency(
    "reports",
    "what a replica says of itself while it drains or parks",
    2.0,
    "asked again until its time to drain is over",
    "it gets no new requests, and is ended then",
    "kelvin_replicas",
)
ADOPTION: Final = Dependency(
    "adoption",
    "what a replica of the control plane before says of itself",
    3.0,
    "asked each 1 s until it answers; sockets are looked for each 30 s",
    "it keeps its slot, a call for its version starts another in a free one; what hangs is killed by the watchdog",
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
    "none: asked when somebody asks, about wrong memory each 2 s",
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
    "the lock of `kelvin.db`, where another process holds it; a session with PostgreSQL, or a lock there",
    5.0,
    "none",
    "what is known serves and wakes; changes are `unavailable`, records wait in their spools",
    "kelvin_spool_backlog_records",
)

CLUSTER: Final = Dependency(
    "cluster",
    "a call of the API server: an object written, a page of a list",
    30.0,
    "all pause, doubling to 16 s, where it is away; one that it does not take waits for itself, doubling to 300 s",
    "what runs serves on, and scales; changes wait and are shown",
    "kelvin_replicas",
)
WATCH: Final = Dependency(
    "watch",
    "silence of the API server about a kind of object; it ends each watch 15 s sooner itself",
    75.0,
    "begun again where it was, after drawn pauses up to 30 s",
    "what was seen last counts; all is listed anew where something may have been missed",
    "kelvin_replicas",
)
POOL: Final = Dependency(
    "pool",
    "a pod that waits for a version saying what it does, or taking an order; a bind may take as long as a restore",
    5.0,
    "asked again each 5 s; a version is tried on three pods",
    "what is bound serves on; a start waits for another pod, then fails and says so",
    "kelvin_replicas",
)
LEASE: Final = Dependency(
    "lease",
    "a call about the Lease of who leads, or about the pods that are labelled so",
    4.0,
    "asked each 2 s; who could not renew it for 10 s leads no more",
    "others wait for 15 s, then one of them leads; what runs serves on",
    "kelvin_up",
)

STATEMENT_S: Final = 30.0  # of one statement in PostgreSQL, and of a transaction of which nothing is heard
CONNECT_S: Final = 0.0  # of a Unix socket: one that listens takes it at once, or its backlog is full

DEPENDENCIES: Final = (
    ZYGOTE, RESTORE, ORDERS, REPORTS, ADOPTION, SLEEP, SIBLINGS, EVICTION, EXAMINATION, READERS, DATABASE,
    CLUSTER, WATCH, POOL, LEASE,
)  # fmt: skip
