"""The activator's dependencies: for each the timeout, what stops or repeats calls, and the fallback.
`tests/activator/test_dependencies.py` takes each one in SERVING away. Tests of their own parts take the others away.
"""

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
    "a call that tells a replica what was delivered, recorded or cancelled",
    2.0,
    "none: one call at a time for each replica",
    "answers continue; the replica keeps its count, and the ledger uses the activator's record",
    "kelvin_requests_total",
)
FEED: Final = Dependency(
    "feed",
    "the control plane's stream of keys, models and replicas, with a heartbeat every 5 s",
    15.0,
    "reconnects after 0.05 s, doubling to 1 s",
    "the last state is used, for `KELVIN_FEED_MAX_AGE_S`",
    "kelvin_feed_age_seconds",
)
STATS: Final = Dependency(
    "stats",
    "a load report to the autoscaler",
    2.0,
    "repeated after 0.1 s, while a request waits for a start",
    "running replicas serve on; a version at zero is woken on a parked standby",
    "kelvin_feed_connected",
)
LEDGER: Final = Dependency(
    "ledger",
    "sending usage records",
    10.0,
    "one batch at a time, with growing pauses",
    "records wait in the spool",
    "kelvin_spool_backlog_records",
)
KEY_USES: Final = Dependency(
    "key uses",
    "a report of when keys were last used",
    5.0,
    "once a minute",
    "the report is sent later",
    "kelvin_feed_connected",
)
TIMELINES: Final = Dependency(
    "timelines",
    "a request's timeline that another activator has or had",
    5.0,
    "none",
    "timelines of this activator are shown, others are `unavailable`",
    "kelvin_refusals_total",
)
ADMIN: Final = Dependency(
    "admin",
    "a connection for `/admin`; its answer has `KELVIN_DEADLINE_S`",
    5.0,
    "none",
    "`/admin` is `unavailable`, inference continues",
    "kelvin_refusals_total",
)
PUSH: Final = Dependency(
    "push",
    "a connection to the snapshotter for `/push`; its answer has `KELVIN_DEADLINE_S`",
    5.0,
    "none",
    "`/push` is `unavailable`, inference continues",
    "kelvin_refusals_total",
)
ISSUER: Final = Dependency(
    "issuer",
    "the key set of a token issuer",
    5.0,
    "asked at most once per 10 s",
    "its last keys are used until they are too old; API keys are not affected",
    "kelvin_issuer_keys_age_seconds",
)
REDIS: Final = Dependency(
    "redis",
    "limits and budgets that activators share",
    0.25,
    "while it is away it is tried once a second",
    "limits are this activator's share; budgets end with the leased amount",
    "kelvin_redis_connected",
)
FIREWALL: Final = Dependency(
    "firewall",
    "the verdict of the firewall at `KELVIN_WAF_SOCKET`; `KELVIN_WAF_MS` sets the timeout",
    0.05,
    "none: a missing firewall is noticed at once",
    "503 `unavailable`, or the request passes: `KELVIN_WAF_UNANSWERED`",
    "kelvin_firewall_total",
)
SPOOL: Final = Dependency(
    "spool",
    "a disk write: a record is durable before its answer ends",
    10.0,
    "no request is accepted while the last write failed",
    "503 `unavailable`: nothing is served that can't be charged; an answer whose record may be missing is cut",
    "kelvin_requests_total",
)

WAKING: Final = Dependency(
    "waking",
    "a parked standby that takes a version while there is no control plane",
    600.0,
    "of the version",
    "another parked standby; else callers wait until their deadline, or for the control plane",
    "kelvin_own_starts_total",
)
ACCOUNTS: Final = Dependency(
    "accounts",
    "each runtime's report of its state, before the activator chooses a standby",
    1.0,
    "none: once for each such start",
    "a silent runtime counts as holding a slot",
    "kelvin_own_starts_total",
)
AUTOSCALER: Final = Dependency(
    "autoscaler",
    "a connection or a report to Knative's autoscaler at `KELVIN_AUTOSCALER`",
    3.0,
    "reconnects after 0.1 s, growing to 2 s",
    "replicas serve on, `/readyz` is 503; versions at zero wait; an activator that never connected gets no requests",
    "kelvin_autoscaler_connected",
)
POD: Final = Dependency(
    "pod",
    "one probe of a pod that the cluster doesn't call ready yet",
    0.3,
    "repeated after 25 ms, then after a fiftieth of the time since the first probe, at most 1 s",
    "the pod is used once the cluster calls it ready",
    "kelvin_pods_probed",
)

SERVING: Final = (
    REPLICA, RECEIPTS, FEED, STATS, LEDGER, KEY_USES, TIMELINES, ADMIN, PUSH, ISSUER, REDIS, FIREWALL, SPOOL,
)  # fmt: skip
DEPENDENCIES: Final = (*SERVING, WAKING, ACCOUNTS, AUTOSCALER, POD)
