"""What control plane and activator tell each other: a feed of upserts and removals one way, stats and usage the other.

What is asked of a runtime is in `jobs`.
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
    """What a key may do in its tenant; what includes what is in `scopes`."""

    INFER = "infer"  # everything below /v1 and /v2
    PUSH = "push"  # everything below /push/v1
    BILLING_READ = "billing:read"
    ADMIN = "admin"  # everything below /admin/v1 but what the next one is for, keys included
    OPERATOR = "operator"  # tenants, and their keys


_ADMIN_SCOPES: Final = frozenset((Scope.PUSH, Scope.BILLING_READ))
# An operator makes keys of any kind, so that to leave them less would only look like it.
_INCLUDED_SCOPES: Final = {Scope.ADMIN: _ADMIN_SCOPES, Scope.OPERATOR: _ADMIN_SCOPES | {Scope.ADMIN}}


def scope_allows(held: Collection[Scope], wanted: Scope) -> bool:
    """Whether a key with the scopes `held` may do what needs `wanted`."""
    return wanted in held or any(wanted in _INCLUDED_SCOPES.get(scope, ()) for scope in held)


Priority = Literal["batch", "standard", "interactive"]  # from the lowest to the highest
MAX_WEIGHT: Final = 1000  # of a tenant; the least is 1
Limit = Annotated[int, Meta(le=MAX_LIMIT)]


class TenantLimits(Fact, frozen=True):
    """What a tenant may use at most; None where the installation's setting holds for it. See `patches.py`.

    Stored as JSON: a bound that becomes narrower, or a limit that goes, needs a migration.
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
    """A tenant whose keys may be good. Those of a suspended one are known and refused."""

    tenant: str
    suspended: bool
    limits: TenantLimits = TenantLimits()


class KeyRow(Fact, frozen=True):
    """A credential as the activator knows it: SHA-256 of the secret (256 random bits need no slow hash)."""

    key_id: str
    secret_sha256: str
    tenant: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] = ()  # which may be called; empty: all
    expires_at_s: int | None = None


class Principal(Fact, frozen=True):
    """Who calls, as authenticated by the activator; travels inwards as the header `x-kelvin-principal`."""

    key_id: str
    tenant: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] = ()  # which may be called; empty: all

    def may_call(self, model: str) -> bool:
        """Whether the key is for this model, as its tenant calls it (`names.model_for`)."""
        return not self.models or model in self.models


class ModelRow(Fact, frozen=True):
    """A model, its aliases and the versions that may be addressed."""

    tenant: str
    model: str
    aliases: dict[str, str]  # alias -> version
    created_at_s: int
    split: dict[str, int] = field(
        default_factory=dict
    )  # versions that share what is asked of `prod`, by weight; empty: all is prod's own
    grantees: tuple[str, ...] = ()  # other tenants that may call it
    ladder: tuple[DegradationStep, ...] = ()  # what it gives up before it refuses what is asked of `prod`
    plan_ladders: dict[str, tuple[DegradationStep, ...]] = field(
        default_factory=dict
    )  # in its place, for tenants of that plan
    backlog_s: Annotated[float, Meta(ge=0)] = 0.0  # of work before a replica, by which tokens count; 0: they don't
    # Version that was only just named -> the one before it, which answers what that can't take yet while it is awake.
    meanwhile: dict[str, str] = field(default_factory=dict)


class VersionRow(Fact, frozen=True):
    """A version that is ready to serve, with what the door needs to know of it."""

    tenant: str
    model: str
    version: str
    limits: Limits
    created_at_s: int
    kind: Kind = "generate"
    signature: Signature | None = None  # of what predicts


class ReplicaRow(Fact, frozen=True):
    """A replica that takes requests. `address` is a socket name within the run directory, `url` where it is reached
    from other hosts, or "".
    """

    runtime_id: str
    tenant: str
    model: str
    version: str
    address: str
    max_streams: int
    draining: bool
    restore: tuple[StageSpan, ...]  # its restore, microseconds after it was asked for
    url: str = ""
    unproven: bool = False  # a pod that the cluster doesn't call ready yet: whoever would use it probes it first


class RevisionRow(Fact, frozen=True):
    """Where Knative's autoscaler hears of a version: the namespace and name of its Revision, which scales it."""

    tenant: str
    model: str
    version: str
    namespace: str
    name: str


class PoolRow(Fact, frozen=True):
    """Where Knative's autoscaler hears of pods that wait for versions, and what each activator tells it: its `share` of
    how many are `wanted`, by the activators that hear this.
    """

    namespace: str
    name: str
    share: float
    wanted: int = 0


class RestoreFailure(Fact, frozen=True):
    """A start of the version failed for good: waiters are told this instead of waiting."""

    tenant: str
    version: str
    code: str
    status: int
    message: str
    retryable: bool

    @classmethod
    def of(cls, tenant: str, version: str, failure: Failure) -> "RestoreFailure":
        """Of a version of the tenant's, for that reason."""
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

    `exit_status` is that of the process that ended last, as `Popen.returncode`; known only for some crash loops.
    """

    reason: StartReason
    message: str
    exit_status: int | None = None


class StartProblemRow(Fact, frozen=True):
    """The start problem of a version. State: it stands until it is replaced, or removed with or without its version."""

    tenant: str
    model: str
    version: str
    problem: StartProblem


READER_HEADER: Final = "x-kelvin-reader"  # of a request for the feed: who reads, by a name that is its alone


class Feed(Fact, frozen=True):
    """One line of `GET /internal/v1/feed`. The first is a snapshot (`full`), the rest are changes in order."""

    revision: int = 0  # 0: not published yet
    full: bool = False
    tenants: tuple[TenantRow, ...] = ()
    keys: tuple[KeyRow, ...] = ()
    models: tuple[ModelRow, ...] = ()
    versions: tuple[VersionRow, ...] = ()
    replicas: tuple[ReplicaRow, ...] = ()
    failures: tuple[RestoreFailure, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    starts: tuple[StartRow, ...] = ()  # of versions at zero; over once a replica of theirs is told
    spending: tuple[SpendingRow, ...] = ()
    revisions: tuple[RevisionRow, ...] = ()  # of versions that Knative scales
    pools: tuple[PoolRow, ...] = ()  # in their place; all of them, where any is told
    start_problems: tuple[StartProblemRow, ...] = ()  # one a version at most; the newest counts
    removed_tenants: tuple[str, ...] = ()
    removed_keys: tuple[str, ...] = ()
    removed_models: tuple[tuple[str, str], ...] = ()  # (tenant, model), its versions with it
    removed_versions: tuple[tuple[str, str, str], ...] = ()  # (tenant, model, version), its revision with it
    removed_replicas: tuple[str, ...] = ()
    removed_revisions: tuple[tuple[str, str, str], ...] = ()  # (tenant, model, version): it is scaled no more
    removed_start_problems: tuple[tuple[str, str, str], ...] = ()  # (tenant, model, version)
    machine: Machine | None = None  # in a snapshot: by which starts are given their part of it


class KeyUses(Fact, frozen=True):
    """Body of `POST /internal/v1/keys/uses`: the minute in which each of these keys was last good, seconds of 1970."""

    used_at_s: dict[str, int]


class ConcurrencyStat(Fact, frozen=True):
    """Time-weighted concurrency of one version at one activator since its last report; all reports of a second add."""

    tenant: str
    model: str
    version: str
    concurrency: float
    requests: int


class Stats(Fact, frozen=True):
    """Body of `POST /internal/v1/stats`, once a second, and at once for the first request of a version."""

    activator: str
    stats: tuple[ConcurrencyStat, ...]


class RequestBatch(Fact, frozen=True):
    """Body of `POST /internal/v1/usage/requests`; answered 204 once durable. Repeats are harmless.

    A record that the ledger can't read is kept aside there, and holds up no other.
    """

    records: tuple[RequestRecord, ...]


class LifetimeBatch(Fact, frozen=True):
    """Body of `POST /internal/v1/usage/lifetimes`; answered 204 once durable. Repeats are harmless."""

    records: tuple[LifetimeRecord, ...]


def batch_of(payloads: Sequence[bytes]) -> Raw:
    """Return the body of a batch of records that are encoded already. One that is no JSON becomes a string."""
    if not _is_json(joined := b",".join(payloads), len(payloads)):
        joined = b",".join(
            payload if _is_json(payload, 1) else encode(payload.decode(errors="backslashreplace"))
            for payload in payloads
        )
    return Raw(b'{"records":[%b]}' % joined)


def _is_json(joined: bytes, number: int) -> bool:
    """Return whether these are so many JSON values with a comma between them."""
    try:
        return len(decoder(list[Raw]).decode(b"[%b]" % joined)) == number
    except BadJson:
        return False


class RunningLifetimes(Fact, frozen=True):
    """Body of `POST /internal/v1/usage/lives`: replicas that live, each as if it ended now. Answered 204 once durable.

    The newest of a replica counts, until its record comes; source, sequence and exit status say nothing.
    """

    records: tuple[LifetimeRecord, ...]


class TimelineAnswer(Wire, frozen=True, omit_defaults=True):
    """`GET /v1/requests/ID/timeline`."""

    request_id: str
    model: str
    version: str | None
    cold: bool
    stamps: tuple[Stamp, ...]
    start_problem: StartProblem | None = None  # why no replica came for which it waited


class VersionRegistration(Fact, frozen=True):
    """`POST /internal/v1/versions`: the snapshotter published this; the first of a model creates the alias `prod`."""

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
    pushed_by: str = ""  # the id of the tenant's key
    checked: bool = False  # whether this push read all chunks from the store; most pushes only write missing ones


class RegistrationResult(Fact, frozen=True):
    """The answer to a `VersionRegistration`: whether the model had no such version, or had deleted it.

    `start_problem`: why the version could not start now, where that is known. `fault`: the code of what a restore found
    broken, if this push has not checked the version.
    """

    is_new: bool
    was_deleted: bool = False
    fault: str | None = None
    start_problem: StartProblem | None = None


class NamedVersions(Fact, frozen=True):
    """`GET /internal/v1/versions?tenant=T`: every version that a model of the tenant names; deleted ones are not."""

    versions: tuple[str, ...]
