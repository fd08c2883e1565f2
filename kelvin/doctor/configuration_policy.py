"""Judge settings across services: unknown names, and values that contradict each other. Pure.

Each service checks its own single values. `tests/consistency/test_known_settings.py` compares the names here with the
code.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Final

from kelvin.doctor.finding_policy import Finding, FindingLevel, format_bytes

PREFIX: Final = "KELVIN_"
_MIB: Final = 1 << 20
# Settings whose values are compared, with their defaults. For the others only the name is known.
DEFAULTS: Final[Mapping[str, float]] = {
    "KELVIN_DRAIN_S": 45, "KELVIN_ACTIVATOR_DRAIN_S": 30, "KELVIN_RUNTIME_DRAIN_S": 30,
    "KELVIN_QUEUE_REQUESTS": 1024, "KELVIN_QUEUE_REQUESTS_PER_TENANT": 2048, "KELVIN_QUEUE_REQUESTS_IN_ALL": 4096,
    "KELVIN_QUEUE_BYTES": 64 * _MIB, "KELVIN_QUEUE_BYTES_PER_TENANT": 128 * _MIB,
    "KELVIN_QUEUE_BYTES_IN_ALL": 256 * _MIB, "KELVIN_QUEUE_TOKENS": 8 << 20,
    "KELVIN_QUEUE_TOKENS_PER_TENANT": 16 << 20, "KELVIN_QUEUE_TOKENS_IN_ALL": 32 << 20,
    "KELVIN_BODY_BYTES": 8 * _MIB, "KELVIN_BODY_BYTES_IN_ALL": 512 * _MIB,
    "KELVIN_ADDRESS_CONNECTIONS": 1024,
    "KELVIN_REQUESTS": 4096, "KELVIN_CONNECTIONS": 8192, "KELVIN_QUEUE_S": 600, "KELVIN_DEADLINE_S": 600,
    "KELVIN_RESTORE_S": 600, "KELVIN_PACK_BYTES": 256 * _MIB, "KELVIN_CHUNK_BYTES": 8 * _MIB,
    "KELVIN_DEVICE_SLOTS": 8, "KELVIN_STANDBYS": 1, "KELVIN_THREADS": 1, "KELVIN_KV_BYTES": 512 * _MIB,
    "KELVIN_BACKUP_S": 240,
}  # fmt: skip
OTHER_SETTINGS: Final = frozenset({
    "KELVIN_STANDBY_BYTES", "KELVIN_STANDBY_LISTEN", "KELVIN_STANDBY_SHARE", "KELVIN_STANDBY_TARGET",
    "KELVIN_CERTIFICATES", "KELVIN_LAME_DUCK_S", "KELVIN_LISTENER_FD",
    "KELVIN_ADDRESS_RATE", "KELVIN_BODY_RATE", "KELVIN_HEADERS", "KELVIN_TRUSTED_ADDRESSES",
    "KELVIN_BACKUP", "KELVIN_BACKUP_DAYS", "KELVIN_BODY_S", "KELVIN_BREAKER_S", "KELVIN_COLLECT_GRACE_S", "KELVIN_DATA",
    "KELVIN_ACTIVATOR_LISTEN", "KELVIN_AUTOSCALER", "KELVIN_DOMAIN", "KELVIN_HEALTH_LISTEN", "KELVIN_HEDGE_REQUESTS",
    "KELVIN_DATABASE", "KELVIN_DATABASE_PASSWORD_FILE",
    "KELVIN_GATE_S", "KELVIN_HANDSHAKE_S", "KELVIN_HEAD_BYTES", "KELVIN_HEAD_S", "KELVIN_HEDGE_PERCENT", "KELVIN_HOST",
    "KELVIN_HOST_BYTES", "KELVIN_HTTP2", "KELVIN_IDLE_S", "KELVIN_LIFELINE_FD", "KELVIN_LIFE_S",
    "KELVIN_LOG_LEVEL", "KELVIN_POD",
    "KELVIN_FEED_MAX_AGE_S", "KELVIN_FILTERS", "KELVIN_MEMORY_PRICE",
    "KELVIN_NVME_BYTES", "KELVIN_OIDC", "KELVIN_OTLP_ENDPOINT", "KELVIN_PEERS", "KELVIN_PEER_KEY", "KELVIN_REDIS",
    "KELVIN_CONTROL", "KELVIN_CONTROL_LISTEN", "KELVIN_INNER_CA", "KELVIN_INNER_ID", "KELVIN_INNER_TLS",
    "KELVIN_RUNTIME_LISTEN", "KELVIN_SNAPSHOTTER", "KELVIN_SNAPSHOTTER_LISTEN",
    "KELVIN_PEER_LISTEN", "KELVIN_PORT", "KELVIN_PRICE_BOOK", "KELVIN_PUSH_PLANS", "KELVIN_RECHECK",
    "KELVIN_PUSH_PLAN_AGE_S", "KELVIN_PUSH_VERSION_BYTES", "KELVIN_READY_S", "KELVIN_SCALE_DOWN_S", "KELVIN_SEAL_S",
    "KELVIN_SLAB_BYTES", "KELVIN_SPARE_BYTES", "KELVIN_STALL_S", "KELVIN_STEP_S", "KELVIN_STORE", "KELVIN_STORE_READS",
    "KELVIN_TENANT_STORE_BYTES", "KELVIN_TRACE_SHARE", "KELVIN_TRUST_ROOTS", "KELVIN_UPLOAD_BYTES", "KELVIN_VERIFY",
    "KELVIN_CACHE_AGENT", "KELVIN_CACHE_TENANT", "KELVIN_ENGINE",
    "KELVIN_CACHE_BYTES", "KELVIN_CACHE_BYTES_PER_TENANT", "KELVIN_CACHE_S",
    "KELVIN_ONCE_ANSWERS", "KELVIN_ONCE_ANSWERS_PER_TENANT", "KELVIN_ONCE_ANSWER_BYTES", "KELVIN_ONCE_BYTES",
    "KELVIN_ONCE_BYTES_PER_TENANT", "KELVIN_ONCE_S", "KELVIN_SUBSETS",
    "KELVIN_WAF_MS", "KELVIN_WAF_SOCKET", "KELVIN_WAF_UNANSWERED",
    "KELVIN_CLUSTER_APART", "KELVIN_CLUSTER_POOLED", "KELVIN_CLUSTER_POOLS",
    "KELVIN_CLUSTER_CACHE", "KELVIN_CLUSTER_CONTROL", "KELVIN_CLUSTER_DEVICE", "KELVIN_CLUSTER_DEVICE_CLASS",
    "KELVIN_CLUSTER_DEVICES", "KELVIN_CLUSTER_NOTICE_S", "KELVIN_CLUSTER_OVERLAP_S", "KELVIN_CLUSTER_POD",
    "KELVIN_CLUSTER_TRUST",
    "KELVIN_CLUSTER_FEATURES", "KELVIN_CLUSTER_IMAGE", "KELVIN_CLUSTER_INNER_SECRET", "KELVIN_CLUSTER_SNAPSHOTTER",
    "KELVIN_CLUSTER_NAMESPACE", "KELVIN_CLUSTER_NODES", "KELVIN_CLUSTER_PRIORITY_CLASS", "KELVIN_CLUSTER_SECRET",
    "KELVIN_CLUSTER_STORE", "KELVIN_CLUSTER_TIMEOUT_S", "KELVIN_CLUSTER_TOLERATIONS", "KELVIN_SCALING",
    "KELVIN_CA", "KELVIN_KEY", "KELVIN_URL",
    "KELVIN_HOST_QUOTA", "KELVIN_NVME_QUOTA", "KELVIN_SCRUB_S", "PORT",
})  # fmt: skip
KNOWN_SETTINGS: Final = frozenset(DEFAULTS) | OTHER_SETTINGS


@dataclass(frozen=True, slots=True)
class OrderRule:
    """A rule that `small` must not be above `large`. Both are names in `DEFAULTS`."""

    small: str
    large: str
    level: FindingLevel
    cost: str


_TENANT_LIMITS: Final = "a version's queue never fills: the limit of its tenant is reached first"
_TOTAL_LIMITS: Final = "a tenant's queue never fills: the limit for all tenants is reached first"
ORDER_RULES: Final = (
    OrderRule(
        "KELVIN_ACTIVATOR_DRAIN_S", "KELVIN_DRAIN_S", FindingLevel.WARN, "a stop kills requests before their drain ends"
    ),
    OrderRule(
        "KELVIN_RUNTIME_DRAIN_S", "KELVIN_DRAIN_S", FindingLevel.WARN, "a stop kills replicas before their drain ends"
    ),
    OrderRule(
        "KELVIN_BODY_BYTES",
        "KELVIN_BODY_BYTES_IN_ALL",
        FindingLevel.FAIL,
        "the largest body that is allowed never fits",
    ),
    OrderRule(
        "KELVIN_BODY_BYTES",
        "KELVIN_QUEUE_BYTES",
        FindingLevel.WARN,
        "the largest body can't wait for a cold start: 503",
    ),
    OrderRule("KELVIN_QUEUE_BYTES", "KELVIN_QUEUE_BYTES_PER_TENANT", FindingLevel.WARN, _TENANT_LIMITS),
    OrderRule("KELVIN_QUEUE_REQUESTS", "KELVIN_QUEUE_REQUESTS_PER_TENANT", FindingLevel.WARN, _TENANT_LIMITS),
    OrderRule("KELVIN_QUEUE_TOKENS", "KELVIN_QUEUE_TOKENS_PER_TENANT", FindingLevel.WARN, _TENANT_LIMITS),
    OrderRule("KELVIN_QUEUE_BYTES_PER_TENANT", "KELVIN_QUEUE_BYTES_IN_ALL", FindingLevel.WARN, _TOTAL_LIMITS),
    OrderRule("KELVIN_QUEUE_REQUESTS_PER_TENANT", "KELVIN_QUEUE_REQUESTS_IN_ALL", FindingLevel.WARN, _TOTAL_LIMITS),
    OrderRule("KELVIN_QUEUE_TOKENS_PER_TENANT", "KELVIN_QUEUE_TOKENS_IN_ALL", FindingLevel.WARN, _TOTAL_LIMITS),
    OrderRule("KELVIN_REQUESTS", "KELVIN_CONNECTIONS", FindingLevel.NOTE, "each request needs a connection: no effect"),
    OrderRule(
        "KELVIN_ADDRESS_CONNECTIONS", "KELVIN_CONNECTIONS", FindingLevel.NOTE, "one address may take all connections"
    ),
    OrderRule("KELVIN_QUEUE_S", "KELVIN_DEADLINE_S", FindingLevel.NOTE, "no request waits past its deadline"),
    OrderRule(
        "KELVIN_RESTORE_S", "KELVIN_DEADLINE_S", FindingLevel.NOTE, "a start may go on after its caller has left"
    ),
    OrderRule(
        "KELVIN_CHUNK_BYTES", "KELVIN_PACK_BYTES", FindingLevel.WARN, "each pack holds one chunk: many small reads"
    ),
    OrderRule(
        "KELVIN_STANDBYS", "KELVIN_DEVICE_SLOTS", FindingLevel.NOTE, "standbys that can never be used take memory"
    ),
)


def judge_names(names: Collection[str]) -> list[Finding]:
    """Return a warning for each `KELVIN_` variable that is no setting: misspelt, or from an earlier release."""
    findings = []
    # Compare without the prefix: with it, any two names would look alike.
    known = sorted(name.removeprefix(PREFIX) for name in KNOWN_SETTINGS)
    for name in sorted(name for name in names if name.startswith(PREFIX) and name not in KNOWN_SETTINGS):
        close = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=0.7)
        mend = f"perhaps {PREFIX}{close[0]}; or unset it" if close else "unset it"
        findings.append(Finding("setting", FindingLevel.WARN, f"{name} is no setting", "it has no effect", mend))
    return findings or [Finding("settings", FindingLevel.OK, "every KELVIN_ variable is known")]


def judge_values(env: Mapping[str, str], memory_bytes: int, cores: int) -> list[Finding]:
    """Return contradictions between settings on this machine. Non-numbers are skipped: their service reports them."""
    found = {name: number_of(env, name) for name in DEFAULTS}
    findings = []
    for rule in ORDER_RULES:
        small, large = found[rule.small], found[rule.large]
        if small > large and (rule.small in env or rule.large in env):
            seen = f"{rule.small}={small:.12g} is above {rule.large}={large:.12g}"
            mend = f"{rule.small}={large:.12g} or less, or a larger {rule.large}"
            findings.append(Finding("settings contradict", rule.level, seen, rule.cost, mend))
    slots, threads = found["KELVIN_DEVICE_SLOTS"], found["KELVIN_THREADS"]
    host = number_of(env, "KELVIN_HOST_BYTES", memory_bytes / 4)
    promised = host + slots * found["KELVIN_KV_BYTES"]
    if promised > memory_bytes:
        seen = f"host tier {format_bytes(host)} and {slots:g} replicas' KV come to {format_bytes(promised)}"
        cost = f"the machine has {format_bytes(memory_bytes)}: with all slots held, starts fail or the kernel kills"
        mend = "fewer KELVIN_DEVICE_SLOTS, less KELVIN_KV_BYTES or KELVIN_HOST_BYTES"
        findings.append(Finding("settings contradict", FindingLevel.NOTE, seen, cost, mend))
    if threads > cores:
        seen = f"KELVIN_THREADS={threads:g} on {cores} cores"
        cost = "threads of one step wait for one another: 4 to 10 times slower under load"
        findings.append(
            Finding("settings contradict", FindingLevel.WARN, seen, cost, f"KELVIN_THREADS={cores} or less")
        )
    if env.get("KELVIN_LOG_LEVEL") == "debug":
        cost = "a line for each request: a share of the requests per second, and disk"
        findings.append(Finding("settings", FindingLevel.NOTE, "KELVIN_LOG_LEVEL=debug", cost, "unset it when done"))
    return findings or [Finding("settings agree", FindingLevel.OK, "no value contradicts another")]


def number_of(env: Mapping[str, str], name: str, default: float | None = None) -> float:
    """Return the setting's value as a number, or the default if it is absent or not a finite number."""
    fallback = DEFAULTS[name] if default is None else default
    try:
        value = float(env[name])
    except (KeyError, ValueError):
        return fallback
    return value if isfinite(value) else fallback
