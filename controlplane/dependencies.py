"""List what the control plane depends on, as in `docs/operations/outages.md`. Each entry has an outage test."""

from typing import Final

from kelvin.contracts.dependency import Dependency

ZYGOTE: Final = Dependency(
    "zygote",
    "a new standby",
    10.0,
    "a fork at once for each waiting start or job, others as cores are free; 0.1 to 1 s after a failed one",
    "parked standbys take versions; a start without one waits 20 s, a job 30 s, then `unavailable`",
    "kelvin_standbys",
)
RESTORE: Final = Dependency(
    "restore",
    "a standby that takes a version, until it serves",
    600.0,
    "of the version, at activators; a minimum is tried again every 30 s",
    "callers of that version get the reason; other versions start",
    "kelvin_restore_failures_total",
)
ORDERS: Final = Dependency(
    "orders",
    "an order to a replica to drain, or that its memory is wrong",
    5.0,
    "repeated until its drain time is over; once if its memory is wrong",
    "it gets no new requests, and is ended then; a replica with wrong memory is killed",
    "kelvin_replicas",
)
REPORTS: Final = Dependency(
    "reports",
    "a state report of a replica that drains or parks",
    2.0,
    "repeated until its drain time is over",
    "it gets no new requests, and is ended then",
    "kelvin_replicas",
)
ADOPTION: Final = Dependency(
    "adoption",
    "a state report of a replica that the previous control plane started",
    3.0,
    "repeated every 1 s until it answers; sockets are searched for every 30 s",
    "it keeps its slot; a request for its version starts another replica in a free slot; the watchdog ends a hung one",
    "kelvin_replicas",
)
SLEEP: Final = Dependency(
    "sleep",
    "an order to an idle replica to sleep",
    10.0,
    "none: once",
    "it stays awake, or is ended",
    "kelvin_replicas",
)
SIBLINGS: Final = Dependency(
    "siblings",
    "health, metrics and tiers of the other processes",
    1.0,
    "none: asked on demand, about wrong memory every 2 s",
    "shown as away; starts are forecast from measurements",
    "kelvin_up",
)
EVICTION: Final = Dependency(
    "eviction",
    "the cache agent's eviction for an operator, and its state",
    30.0,
    "none",
    "503 `unavailable`; models serve and start",
    "kelvin_up",
)
EXAMINATION: Final = Dependency(
    "examination",
    "the cache agent hashing all that it holds (`kelvin doctor`)",
    900.0,
    "none",
    "503 `unavailable`; models serve and start",
    "kelvin_up",
)
READERS: Final = Dependency(
    "readers",
    "an activator reading a line of the feed",
    10.0,
    "its connection is closed; it reconnects",
    "it gets the whole feed again; other activators are not affected",
    "kelvin_feed_connected",
)
DATABASE: Final = Dependency(
    "database",
    "the lock of `kelvin.db`, where another process holds it; a session with PostgreSQL, or a lock there",
    5.0,
    "none",
    "known models serve and wake; changes are `unavailable`, records wait in their spools",
    "kelvin_spool_backlog_records",
)

CLUSTER: Final = Dependency(
    "cluster",
    "a call of the API server: an object written, a page of a list",
    30.0,
    "if it is away, all calls pause, doubling to 16 s; a refused object waits alone, doubling to 300 s",
    "running versions serve and scale; changes wait and are shown",
    "kelvin_replicas",
)
WATCH: Final = Dependency(
    "watch",
    "silence in a watch of the API server, which ends each watch 15 s earlier itself",
    75.0,
    "resumed where it was, after random pauses up to 30 s",
    "the last known state is used; objects are listed again if changes may have been missed",
    "kelvin_replicas",
)
POOL: Final = Dependency(
    "pool",
    "a state report of a parked pod, or an order to it; a bind may take as long as a restore",
    5.0,
    "repeated every 5 s; a version is tried on three pods",
    "bound pods serve on; a start waits for another pod, then fails with that reason",
    "kelvin_replicas",
)
LEASE: Final = Dependency(
    "lease",
    "a call about the leader's Lease, or about the pods with its label",
    4.0,
    "repeated every 2 s; a leader that could not renew for 10 s steps down",
    "the others wait for 15 s, then one of them leads; running versions serve on",
    "kelvin_up",
)

STATEMENT_S: Final = 30.0  # limit of one PostgreSQL statement, and of a transaction that sends nothing
CONNECT_S: Final = 0.0  # for a Unix socket: a listening one accepts at once, or its backlog is full

DEPENDENCIES: Final = (
    ZYGOTE, RESTORE, ORDERS, REPORTS, ADOPTION, SLEEP, SIBLINGS, EVICTION, EXAMINATION, READERS, DATABASE,
    CLUSTER, WATCH, POOL, LEASE,
)  # fmt: skip
