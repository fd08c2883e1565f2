"""Messages between control plane and activator: a feed of upserts and removals one way, stats and usage the other.

Requests to a runtime are in `artifacts/runtime_control.py`.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta, Raw, field

from kelvin.contracts.accounting.spending import SpendingRow
from kelvin.contracts.accounting.usage import LifetimeRecord, RequestRecord
from kelvin.contracts.artifacts.manifest import Kind, Limits
from kelvin.contracts.artifacts.tensor_schema import Signature
from kelvin.contracts.errors import Failure
from kelvin.contracts.numbers import MAX_LIMIT
from kelvin.contracts.serving.degradation_steps import DegradationStep, PlanName
from kelvin.contracts.serving.machine import Machine
from kelvin.contracts.serving.start_forecast import Forecast, StartRow
from kelvin.contracts.timeline import StageSpan, Stamp
from kelvin.contracts.traffic_errors import StartReason
from kelvin.contracts.wire import BadJson, Fact, Wire, decoder, encode


class Scope(StrEnum):
    """A permission of a key within its tenant. Some scopes include others, see `scope_allows`."""

    INFER = "infer"  # everything below /v1 and /v2
    PUSH = "push"  # everything below /push/v1
    BILLING_READ = "billing:read"
    ADMIN = "admin"  # everything below /admin/v1 except what needs `operator`; includes keys
    OPERATOR = "operator"  # tenants and their keys


_ADMIN_SCOPES: Final = frozenset((Scope.PUSH, Scope.BILLING_READ))
# An operator can create keys of any kind. So excluding scopes here would only appear to restrict it.
_INCLUDED_SCOPES: Final = {Scope.ADMIN: _ADMIN_SCOPES, Scope.OPERATOR: _ADMIN_SCOPES | {Scope.ADMIN}}


def scope_allows(granted: Collection[Scope], required: Scope) -> bool:
    """Return whether a key with the scopes `granted` may do what needs the scope `required`."""
    return required in granted or any(required in _INCLUDED_SCOPES.get(scope, ()) for scope in granted)


Priority = Literal["batch", "standard", "interactive"]  # from the lowest to the highest
MAX_WEIGHT: Final = 1000  # highest weight of a tenant; the lowest is 1
Limit = Annotated[int, Meta(le=MAX_LIMIT)]


class TenantLimits(Fact, frozen=True):
    """A tenant's limits. None: the installation's setting applies. See `patches.py`.

    Stored as JSON: narrowing a bound or removing a limit needs a migration.
    """

    store_bytes: Annotated[Limit, Meta(ge=0, description="Bytes of its packs in the store.")] | None = None
    requests: Annotated[Limit, Meta(ge=1, description="Inference requests at once, those waiting too.")] | None = None
    body_bytes: Annotated[Limit, Meta(ge=1024, description="Bytes of an inference request's body.")] | None = None
    rpm: Annotated[Limit, Meta(ge=1, description="Inference requests a minute.")] | None = None
    tpm: Annotated[Limit, Meta(ge=1, description="Tokens a minute, of prompts and answers.")] | None = None
    context_tokens: Annotated[Limit, Meta(ge=2, description="Tokens of a request's prompt and answer.")] | None = None
    output_tokens: Annotated[Limit, Meta(ge=1, description="Tokens of one answer.")] | None = None
    budget_micros: Annotated[Limit, Meta(ge=0, description="Bill of a month, in micro-units.")] | None = None
    weight: Annotated[int, Meta(ge=1, le=MAX_WEIGHT, description="Weight of its requests among others'.")] | None = None
    priority: Annotated[Priority, Meta(description="Highest priority of a request.")] | None = None
    plan: Annotated[PlanName, Meta(description="Name by which models' ladders have other steps.")] | None = None
    deadline_max_s: Annotated[Limit, Meta(ge=1, description="Seconds until a request's deadline.")] | None = None


class TenantRow(Fact, frozen=True):
    """A tenant that may have valid keys. Keys of a suspended tenant are known and refused."""

    tenant: str
    suspended: bool
    limits: TenantLimits = TenantLimits()


class KeyRow(Fact, frozen=True):
    """A key as the activator knows it: SHA-256 of the secret (256 random bits need no slow hash)."""

    key_id: str
    secret_sha256: str
    tenant: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] = ()  # which may be called; empty: all
    expires_at_s: int | None = None


class Principal(Fact, frozen=True):
    """The caller as authenticated by the activator; sent to inner services in the header `x-kelvin-principal`."""

    key_id: str
    tenant: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] = ()  # which may be called; empty: all

    def may_call(self, model: str) -> bool:
        """Return whether the key may call this model, named as in `names.qualified_model_name`."""
        return not self.models or model in self.models


class ModelRow(Fact, frozen=True):
    """A model, its aliases and the versions that may be addressed."""

    tenant: str
    model: str
    aliases: dict[str, str]  # alias -> version
    created_at_s: int
    # Weights of the versions that share requests for `prod`; empty: all go to the version of `prod`.
    split: dict[str, int] = field(default_factory=dict)
    grantees: tuple[str, ...] = ()  # other tenants that may call the model
    ladder: tuple[DegradationStep, ...] = ()  # degradation steps for requests to `prod`
    plan_ladders: dict[str, tuple[DegradationStep, ...]] = field(default_factory=dict)  # by plan; replaces `ladder`
    # Target backlog of a replica in seconds of work, so that scaling counts tokens. 0: scaling ignores tokens.
    backlog_s: Annotated[float, Meta(ge=0)] = 0.0
    # New version -> its predecessor, which serves while it is awake and the new version is not ready.
    meanwhile: dict[str, str] = field(default_factory=dict)


class VersionRow(Fact, frozen=True):
    """A version that is ready to serve, with the facts that the activator needs."""

    tenant: str
    model: str
    version: str
    limits: Limits
    created_at_s: int
    kind: Kind = "generate"
    signature: Signature | None = None  # for versions of kind `predict`


class ReplicaRow(Fact, frozen=True):
    """A replica that takes requests.

    `address` is a socket name in the run directory. `url` is its address for other hosts, or "".
    """

    runtime_id: str
    tenant: str
    model: str
    version: str
    address: str
    max_streams: int
    draining: bool
    restore: tuple[StageSpan, ...]  # stages of its restore, in microseconds after the request for it
    url: str = ""
    unproven: bool = False  # the cluster doesn't report the pod as ready yet: probe it before use


class RevisionRow(Fact, frozen=True):
    """Namespace and name of the Knative Revision that scales a version. Activators report concurrency for it."""

    tenant: str
    model: str
    version: str
    namespace: str
    name: str


class PoolRow(Fact, frozen=True):
    """A pool of parked pods that Knative scales. Each activator reports its `share` of the `wanted` number."""

    namespace: str
    name: str
    share: float
    wanted: int = 0


class RestoreFailure(Fact, frozen=True):
    """A start of the version failed permanently. Waiting requests fail with this."""

    tenant: str
    version: str
    code: str
    status: int
    message: str
    retryable: bool

    @classmethod
    def from_failure(cls, tenant: str, version: str, failure: Failure) -> "RestoreFailure":
        """Return the row for this failure of a version."""
        return cls(
            tenant=tenant,
            version=version,
            code=failure.code,
            status=failure.status,
            message=failure.message,
            retryable=failure.retryable,
        )


class StartProblem(Fact, frozen=True):
    """Why a version has no replica although one is wanted. `message` is a sentence that the caller may read.

    `exit_status` is that of the last process, as `Popen.returncode`. It is known only for some crash loops.
    """

    reason: StartReason
    message: str
    exit_status: int | None = None


class StartProblemRow(Fact, frozen=True):
    """The start problem of a version. State: valid until it is replaced, or removed with or without its version."""

    tenant: str
    model: str
    version: str
    problem: StartProblem


READER_HEADER: Final = "x-kelvin-reader"  # request header of the feed: a unique name of the reader


class Feed(Fact, frozen=True):
    """One line of `GET /internal/v1/feed`. The first line is a snapshot (`full`), later lines are changes in order."""

    revision: int = 0  # 0: not published yet
    full: bool = False
    tenants: tuple[TenantRow, ...] = ()
    keys: tuple[KeyRow, ...] = ()
    models: tuple[ModelRow, ...] = ()
    versions: tuple[VersionRow, ...] = ()
    replicas: tuple[ReplicaRow, ...] = ()
    failures: tuple[RestoreFailure, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    starts: tuple[StartRow, ...] = ()  # for versions at zero; ends when a replica of the version appears
    spending: tuple[SpendingRow, ...] = ()
    revisions: tuple[RevisionRow, ...] = ()  # for versions that Knative scales
    pools: tuple[PoolRow, ...] = ()  # if not empty: the complete list, which replaces all pools
    start_problems: tuple[StartProblemRow, ...] = ()  # at most one per version; the newest counts
    removed_tenants: tuple[str, ...] = ()
    removed_keys: tuple[str, ...] = ()
    removed_models: tuple[tuple[str, str], ...] = ()  # (tenant, model); also removes the model's versions
    # (tenant, model, version); also removes the version's revision
    removed_versions: tuple[tuple[str, str, str], ...] = ()
    removed_replicas: tuple[str, ...] = ()
    removed_revisions: tuple[tuple[str, str, str], ...] = ()  # (tenant, model, version); Knative no longer scales it
    removed_start_problems: tuple[tuple[str, str, str], ...] = ()  # (tenant, model, version)
    machine: Machine | None = None  # in a snapshot: used to compute each start's share of the machine


class KeyUses(Fact, frozen=True):
    """Body of `POST /internal/v1/keys/uses`: the minute in which each key was last valid, in seconds since 1970."""

    used_at_s: dict[str, int]


class ConcurrencyStat(Fact, frozen=True):
    """Time-weighted concurrency of one version at one activator since its last report. Reports of one second add up."""

    tenant: str
    model: str
    version: str
    concurrency: float
    requests: int


class Stats(Fact, frozen=True):
    """Body of `POST /internal/v1/stats`: sent once a second, and immediately for the first request of a version."""

    activator: str
    stats: tuple[ConcurrencyStat, ...]


class RequestBatch(Fact, frozen=True):
    """Body of `POST /internal/v1/usage/requests`. The response is 204 once durable. Repeats are harmless.

    A record that the ledger can't read is set aside, and does not delay others.
    """

    records: tuple[RequestRecord, ...]


class LifetimeBatch(Fact, frozen=True):
    """Body of `POST /internal/v1/usage/lifetimes`. The response is 204 once durable. Repeats are harmless."""

    records: tuple[LifetimeRecord, ...]


def batch_of(payloads: Sequence[bytes]) -> Raw:
    """Return the body of a batch of encoded records. A record that is not valid JSON becomes a JSON string."""
    if not _is_json(joined := b",".join(payloads), len(payloads)):
        joined = b",".join(
            payload if _is_json(payload, 1) else encode(payload.decode(errors="backslashreplace"))
            for payload in payloads
        )
    return Raw(b'{"records":[%b]}' % joined)


def _is_json(joined: bytes, number: int) -> bool:
    """Return whether `joined` is exactly `number` JSON values separated by commas."""
    try:
        return len(decoder(list[Raw]).decode(b"[%b]" % joined)) == number
    except BadJson:
        return False


class RunningLifetimes(Fact, frozen=True):
    """Body of `POST /internal/v1/usage/lives`: running replicas, each as if it ended now. 204 once durable.

    The newest report of a replica counts, until its final record. Source, sequence and exit status are meaningless
    here.
    """

    records: tuple[LifetimeRecord, ...]


class TimelineAnswer(Wire, frozen=True, omit_defaults=True):
    """Response of `GET /v1/requests/ID/timeline`."""

    request_id: str
    model: str
    version: str | None
    cold: bool
    stamps: tuple[Stamp, ...]
    start_problem: StartProblem | None = None  # why the request's replica did not start


class VersionRegistration(Fact, frozen=True):
    """Body of `POST /internal/v1/versions`: a version was published. A model's first one creates alias `prod`."""

    tenant: str
    model: str
    version: str
    limits: Limits
    architecture: str
    weight_bytes: int
    total_bytes: int
    kv_bytes_per_token: int
    max_positions: int
    kind: Kind = "generate"
    signature: Signature | None = None
    pushed_by: str = ""  # key id of the pusher
    checked: bool = False  # whether this push read all chunks from the store; most pushes only write missing chunks


class RegistrationResult(Fact, frozen=True):
    """Response to a `VersionRegistration`: whether the version is new to the model, or had been deleted.

    `start_problem` says why the version could not start now, if known. `fault` is the code of a fault that a restore
    found, if this push has not checked the version.
    """

    is_new: bool
    was_deleted: bool = False
    fault: str | None = None
    start_problem: StartProblem | None = None


class NamedVersions(Fact, frozen=True):
    """Response of `GET /internal/v1/versions?tenant=T`: all versions of the tenant's models, without deleted ones."""

    versions: tuple[str, ...]
