"""What the activator depends on. A test takes each away."""

from typing import Final

from kelvin.contracts.dependency import Dependency

REPLICA: Final = Dependency(
    "replica",
    "a connection for a request; the answer itself has the request's deadline",
    2.0,
    "of the replica, of the version",
    "another replica, else one that is started",
    "kelvin_retries_total",
)
RECEIPTS: Final = Dependency(
    "receipts",
    "telling a replica what was delivered, recorded, cancelled",
    2.0,
    "none: one call at a time for each replica",
    "answers go on; the replica keeps the account, and the ledger takes the activator's record",
    "kelvin_requests_total",
)
FEED: Final = Dependency(
    "feed",
    "the control plane's word on keys, models, replicas: a heartbeat each 5 s",
    15.0,
    "asked again after 0.05 s, doubling to 1 s",
    "the last word stands, for `KELVIN_FEED_MAX_AGE_S`",
    "kelvin_feed_age_seconds",
)
STATS: Final = Dependency(
    "stats",
    "telling the decider what is asked for",
    2.0,
    "told again after 0.1 s, while somebody waits for a start",
    "what runs serves on; a version at zero is woken on a parked standby",
    "kelvin_feed_connected",
)
LEDGER: Final = Dependency(
    "ledger",
    "handing usage records over",
    10.0,
    "one batch at a time, with growing pauses",
    "records wait in the spool",
    "kelvin_spool_backlog_records",
)
KEY_USES: Final = Dependency(
    "key uses",
    "telling when keys were last good",
    5.0,
    "once a minute",
    "they are told later",
    "kelvin_feed_connected",
)
TIMELINES: Final = Dependency(
    "timelines",
    "a request's timeline that another activator has, or had",
    5.0,
    "none",
    "own ones are shown, others are `unavailable`",
    "kelvin_refusals_total",
)
ADMIN: Final = Dependency(
    "admin",
    "a connection for `/admin`; its answer has `KELVIN_DEADLINE_S`",
    5.0,
    "none",
    "`/admin` is `unavailable`, inference goes on",
    "kelvin_refusals_total",
)
PUSH: Final = Dependency(
    "push",
    "a connection to the snapshotter for `/push`, likewise",
    5.0,
    "none",
    "`/push` is `unavailable`, inference goes on",
    "kelvin_refusals_total",
)
ISSUER: Final = Dependency(
    "issuer",
    "the keys of an issuer of tokens",
    5.0,
    "asked every 10 s at the most, whoever wants it",
    "the keys that it had count until they are too old; API keys go on",
    "kelvin_issuer_keys_age_seconds",
)
REDIS: Final = Dependency(
    "redis",
    "limits and budgets that activators share",
    0.25,
    "while it is away it is asked once a second",
    "limits are this activator's share; budgets end with what is leased",
    "kelvin_redis_connected",
)
FIREWALL: Final = Dependency(
    "firewall",
    "the operator's own word on a request, where `KELVIN_WAF_SOCKET` names one; `KELVIN_WAF_MS` sets the timeout",
    0.05,
    "none: one that is away says so at once",
    "503 `unavailable`, or it passes: `KELVIN_WAF_UNANSWERED`",
    "kelvin_firewall_total",
)
SPOOL: Final = Dependency(
    "spool",
    "the disk: a record is durable before an answer ends",
    10.0,
    "no request is taken on while the last write failed",
    "503 `unavailable`: nothing is served that can't be charged; an answer that may have been is cut",
    "kelvin_requests_total",
)

WAKING: Final = Dependency(
    "waking",
    "a parked standby that takes a version while no control plane has one do it",
    600.0,
    "of the version",
    "another one that is parked; else callers wait for their time, or for the control plane",
    "kelvin_own_starts_total",
)
ACCOUNTS: Final = Dependency(
    "accounts",
    "what each runtime says that it is, before a standby is chosen so",
    1.0,
    "none: asked for each such start",
    "who says nothing counts as one that holds a slot",
    "kelvin_own_starts_total",
)
AUTOSCALER: Final = Dependency(
    "autoscaler",
    "telling Knative's autoscaler, which `KELVIN_AUTOSCALER` names, what is asked for: connecting, and each telling",
    3.0,
    "connected again after 0.1 s, growing to 2 s",
    "what runs serves on, `/readyz` says 503; a version at zero waits for it; one that it never heard gets no requests",
    "kelvin_autoscaler_connected",
)
POD: Final = Dependency(
    "pod",
    "whether a pod that the cluster doesn't call ready yet takes requests: one probe",
    0.3,
    "after 25 ms, then after a fiftieth of the time that it has been asked for, 1 s at the most",
    "it is used once the cluster calls it ready",
    "kelvin_pods_probed",
)

SERVING: Final = (
    REPLICA, RECEIPTS, FEED, STATS, LEDGER, KEY_USES, TIMELINES, ADMIN, PUSH, ISSUER, REDIS, FIREWALL, SPOOL,
)  # fmt: skip
DEPENDENCIES: Final = (*SERVING, WAKING, ACCOUNTS, AUTOSCALER, POD)
