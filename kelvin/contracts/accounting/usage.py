"""Usage records: one per request, and one per lifetime of a replica. Both are idempotent by their id.

An activator sends receipts to a replica while a request runs. So if either of the two dies, the other can write the
record.
"""

from enum import StrEnum
from typing import Final

from msgspec import UNSET, UnsetType

from kelvin.contracts.timeline import Stamp
from kelvin.contracts.wire import Fact, Wire

OK: Final = "ok"  # outcome of a successful request
ACK_TOKENS: Final = 64  # an activator acknowledges delivered tokens of a stream after every so many tokens
RUNNING_REPORT_INTERVAL_S: Final = 60  # longest time between two usage reports of a replica that runs in a pod
KILLED: Final = -9  # exit status after SIGKILL; also used if no process observed the exit
# Prefix of `source` in the record of a replica whose end was never reported. Its last report counts.
UNSEEN_END_PREFIX: Final = "cut-"


def is_charged(outcome: str | None, completion_tokens: int) -> bool:
    """Return whether a request is charged: it succeeded, or some of its answer was delivered before it failed."""
    return outcome == OK or completion_tokens > 0


class RecordOrigin(StrEnum):
    """The writer of a request record. For one request id, the activator's record overrides an orphan's."""

    ACTIVATOR = "activator"
    ORPHAN = "orphan"  # written by the runtime after its activator was gone


class RequestRecord(Wire, frozen=True):
    """One request of an authenticated caller to a model, with any outcome.

    `completion_tokens` counts delivered tokens. For a non-streamed response that was cut short (`cancelled`,
    `deadline_exceeded`), it counts the tokens computed until the cut took effect.
    """

    request_id: str
    origin: RecordOrigin
    source: str  # the spool that carries the record: one per process lifetime
    sequence: int  # counts from 1 within `source` without gaps: a gap is a lost record
    tenant: str
    model: str
    version: str | None
    key_id: str
    runtime_id: str | None
    started_at_us: int  # wall clock, microseconds since 1970
    ended_at_us: int
    queued_us: int
    outcome: str  # OK, or the failure's code
    status: int
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    device_us: int
    timeline: tuple[Stamp, ...] | None = None  # for cold starts and failures only
    # Set if the request had an `Idempotency-Key`: all requests with the same value are billed once. An unset field is
    # absent from the bytes, so old records keep their digest.
    once: str | UnsetType = UNSET
    # The degradation step that was applied: "cap-output=TOKENS", "cached=SECONDS", or "fallback-of=" and the requested
    # model.
    degraded: str | UnsetType = UNSET


class LifetimeRecord(Wire, frozen=True):
    """One replica from birth to death. The supervisor measures `total_us`; the runtime measures the four parts."""

    runtime_id: str
    source: str
    sequence: int
    pid: int
    tenant: str | None  # None: a standby died unused, at the platform's cost
    model: str | None
    version: str | None
    device_class: str
    born_at_us: int  # wall clock
    died_at_us: int
    total_us: int
    standby_us: int
    restore_us: int
    active_us: int
    idle_us: int
    requests: int  # number of request records that must exist for this replica
    exit_status: int  # as `Popen.returncode`: a negative value is the signal
    cpu_us: int
    max_rss_kb: int


class Receipt(Fact, frozen=True):
    """Delivery receipt of one request. Counts are cumulative, so a repeated or lost receipt does no harm."""

    request_id: str
    completion_tokens: int  # tokens that the client's socket has accepted
    recorded: bool = False  # the activator's record is durable, so the replica may forget the request


class Receipts(Fact, frozen=True):
    """Body of `POST /v1/receipts` at a replica."""

    receipts: tuple[Receipt, ...]
