"""What is metered: one record per request, one per lifetime of a replica. Both are idempotent by their id.

Receipts are what an activator tells a replica meanwhile, so that one of the two writes the record whoever dies.
"""

from enum import StrEnum
from typing import Final

from msgspec import UNSET, UnsetType

from kelvin.contracts.timeline import Stamp
from kelvin.contracts.wire import Fact, Wire

ACK_TOKENS: Final = 64  # an activator acknowledges a stream's delivered tokens this often
RUNNING_REPORT_INTERVAL_S: Final = (
    60  # the longest that a replica in a pod lives between two words of how it has lived so far
)
KILLED: Final = -9  # by SIGKILL, as an exit status; also of a life whose end nobody saw
UNSEEN_END_PREFIX: Final = (
    "cut-"  # what the source of a life begins with whose end was never told: its last word counts
)


class RecordOrigin(StrEnum):
    """Who wrote a request record; an activator's stands over an orphan's of the same id."""

    ACTIVATOR = "activator"
    ORPHAN = "orphan"  # by the runtime, whose activator went away


class RequestRecord(Wire, frozen=True):
    """One request of an authenticated caller to a model, whatever came of it. Tokens of the answer are those delivered;
    of a whole answer that was cut for its caller (`cancelled`, `deadline_exceeded`) those computed until the cut took
    effect.
    """

    request_id: str
    origin: RecordOrigin
    source: str  # the spool that carries it: one per process lifetime
    sequence: int  # gapless from 1 within `source`: a hole is a lost record
    tenant: str
    model: str
    version: str | None
    key_id: str
    runtime_id: str | None
    started_at_us: int  # wall clock, microseconds since 1970
    ended_at_us: int
    queued_us: int
    outcome: str  # "ok", or the failure's code
    status: int
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    device_us: int
    timeline: tuple[Stamp, ...] | None = None  # of cold starts and failures
    # What an `Idempotency-Key` makes of all requests that are one for the bill. Not set it is not in the bytes, either:
    # records that are digested as they came keep their digest.
    once: str | UnsetType = UNSET
    # What its model's ladder gave up for it: "cap-output=TOKENS", "cached=SECONDS", or "fallback-of=" and the model
    # that was asked.
    degraded: str | UnsetType = UNSET


class LifetimeRecord(Wire, frozen=True):
    """One replica from birth to death. total is the supervisor's clock; the four parts are the runtime's own."""

    runtime_id: str
    source: str
    sequence: int
    pid: int
    tenant: str | None  # None where a standby died unused: the platform's cost
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
    requests: int  # request records that must exist for it
    exit_status: int  # as Popen.returncode: negative is the signal
    cpu_us: int
    max_rss_kb: int


class Receipt(Fact, frozen=True):
    """Of one request. Cumulative: a repeated or lost one changes nothing."""

    request_id: str
    completion_tokens: int  # that the client's socket has accepted
    recorded: bool = False  # the activator's record is durable: the replica may forget the request


class Receipts(Fact, frozen=True):
    """Body of `POST /v1/receipts` at a replica."""

    receipts: tuple[Receipt, ...]
