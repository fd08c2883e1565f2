"""The activator's dependencies: for each the timeout, what stops or repeats calls (`breaker`), and the fallback.
`tests/activator/test_dependencies.py` takes each one in SERVING away. Tests of their own parts take the others away.
"""

from typing import Final

from kelvin.contracts.dependency import Dependency

REPLICA: Final = Dependency(
    name="replica",
    purpose="a connection for a request; the answer itself has the request's deadline",
    timeout_s=2.0,
    breaker="of the replica, of the version",
    fallback="another replica, else one that is started",
    indicator="kelvin_retries_total",
)
RECEIPTS: Final = Dependency(
    name="receipts",
    purpose="a call that tells a replica what was delivered, recorded or cancelled",
    timeout_s=2.0,
    breaker="none: one call at a time for each replica",
    fallback="answers continue; the replica keeps its count, and the ledger uses the activator's record",
    indicator="kelvin_requests_total",
)
FEED: Final = Dependency(
    name="feed",
    purpose="the control plane's stream of keys, models and replicas, with a heartbeat every 5 s",
    timeout_s=15.0,
    breaker="reconnects after 0.05 s, doubling to 1 s",
    fallback="the last state is used, for `KELVIN_FEED_MAX_AGE_S`",
    indicator="kelvin_feed_age_seconds",
)
STATS: Final = Dependency(
    name="stats",
    purpose="a load report to the autoscaler",
    timeout_s=2.0,
    breaker="repeated after 0.1 s, while a request waits for a start",
    fallback="running replicas serve on; a version at zero is woken on a parked standby",
    indicator="kelvin_feed_connected",
)
LEDGER: Final = Dependency(
    name="ledger",
    purpose="sending usage records",
    timeout_s=10.0,
    breaker="one batch at a time, with growing pauses",
    fallback="records wait in the spool",
    indicator="kelvin_spool_backlog_records",
)
KEY_USES: Final = Dependency(
    name="key uses",
    purpose="a report of when keys were last used",
    timeout_s=5.0,
    breaker="once a minute",
    fallback="the report is sent later",
    indicator="kelvin_feed_connected",
)
TIMELINES: Final = Dependency(
    name="timelines",
    purpose="a request's timeline that another activator has or had",
    timeout_s=5.0,
    breaker="none",
    fallback="timelines of this activator are shown, others are `unavailable`",
    indicator="kelvin_refusals_total",
)
ADMIN: Final = Dependency(
    name="admin",
    purpose="a connection for `/admin`; its answer has `KELVIN_DEADLINE_S`",
    timeout_s=5.0,
    breaker="none",
    fallback="`/admin` is `unavailable`, inference continues",
    indicator="kelvin_refusals_total",
)
PUSH: Final = Dependency(
    name="push",
    purpose="a connection to the snapshotter for `/push`; its answer has `KELVIN_DEADLINE_S`",
    timeout_s=5.0,
    breaker="none",
    fallback="`/push` is `unavailable`, inference continues",
    indicator="kelvin_refusals_total",
)
ISSUER: Final = Dependency(
    name="issuer",
    purpose="the key set of a token issuer",
    timeout_s=5.0,
    breaker="asked at most once per 10 s",
    fallback="its last keys are used until they are too old; API keys are not affected",
    indicator="kelvin_issuer_keys_age_seconds",
)
REDIS: Final = Dependency(
    name="redis",
    purpose="limits and budgets that activators share",
    timeout_s=0.25,
    breaker="while it is away it is tried once a second",
    fallback="limits are this activator's share; budgets end with the leased amount",
    indicator="kelvin_redis_connected",
)
FIREWALL: Final = Dependency(
    name="firewall",
    purpose="the verdict of the firewall at `KELVIN_WAF_SOCKET`; `KELVIN_WAF_MS` sets the timeout",
    timeout_s=0.05,
    breaker="none: a missing firewall is noticed at once",
    fallback="503 `unavailable`, or the request passes: `KELVIN_WAF_UNANSWERED`",
    indicator="kelvin_firewall_total",
)
SPOOL: Final = Dependency(
    name="spool",
    purpose="a disk write: a record is durable before its answer ends",
    timeout_s=10.0,
    breaker="no request is accepted while the last write failed",
    fallback="503 `unavailable`: nothing is served that can't be charged; an answer whose record may be missing is cut",
    indicator="kelvin_requests_total",
)

WAKING: Final = Dependency(
    name="waking",
    purpose="a parked standby that takes a version while there is no control plane",
    timeout_s=600.0,
    breaker="of the version",
    fallback="another parked standby; else callers wait until their deadline, or for the control plane",
    indicator="kelvin_own_starts_total",
)
ACCOUNTS: Final = Dependency(
    name="accounts",
    purpose="each runtime's report of its state, before the activator chooses a standby",
    timeout_s=1.0,
    breaker="none: once for each such start",
    fallback="a silent runtime counts as holding a slot",
    indicator="kelvin_own_starts_total",
)
AUTOSCALER: Final = Dependency(
    name="autoscaler",
    purpose="a connection or a report to Knative's autoscaler at `KELVIN_AUTOSCALER`",
    timeout_s=3.0,
    breaker="reconnects after 0.1 s, growing to 2 s",
    fallback="replicas serve on, `/readyz` is 503; versions at zero wait; "
    "an activator that never connected gets no requests",
    indicator="kelvin_autoscaler_connected",
)
POD: Final = Dependency(
    name="pod",
    purpose="one probe of a pod that the cluster doesn't call ready yet",
    timeout_s=0.3,
    breaker="repeated after 25 ms, then after a fiftieth of the time since the first probe, at most 1 s",
    fallback="the pod is used once the cluster calls it ready",
    indicator="kelvin_pods_probed",
)

SERVING: Final = (
    REPLICA, RECEIPTS, FEED, STATS, LEDGER, KEY_USES, TIMELINES, ADMIN, PUSH, ISSUER, REDIS, FIREWALL, SPOOL,
)  # fmt: skip
DEPENDENCIES: Final = (*SERVING, WAKING, ACCOUNTS, AUTOSCALER, POD)
