"""One running inference request: its content, its model and its deadline. An invalid request leaves no record."""

import time
from typing import Final

import msgspec

from activator.accounting.request_account import Account
from activator.http.exchange import Exchange
from activator.limits.rate_limits import TokenReservation
from activator.queue.policy.queued_request import PriorityClass, QueuedRequest, read_priority_class
from activator.queue.version_queue import Replica
from activator.routing.policy.affinity import Affinity, read_affinity, read_session
from activator.routing.policy.request_body import RequestBody, read_body
from activator.routing.policy.version_key import VersionKey
from activator.routing.policy.version_resolution import ModelEntry, merge_references
from activator.routing.request_routes import RunInference
from activator.routing.routing_table import RoutingTable, authorize_model
from activator.upstream.replica_sessions import ReplicaSessions
from activator.upstream.upstream_request import UpstreamHeaders, UpstreamRequest
from kelvin.contracts.artifacts.kind_routes import ROUTES_BY_KIND
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.names import ModelReference
from kelvin.contracts.serving.control_messages import Principal, TenantLimits
from kelvin.contracts.serving.token_limits import NO_TOKEN_LIMITS, TokenLimits
from kelvin.contracts.timeline import Timeline

WAITING: Final = frozenset({"restoring", "queued"})  # stages without a slot


class InferenceRequest(msgspec.Struct):
    """A parsed request and its progress."""

    exchange: Exchange
    path: str
    body: bytes
    parsed_body: RequestBody  # the fields that are read of `body`
    priority_class: PriorityClass
    affinity: Affinity | None
    reference: ModelReference
    entry: ModelEntry
    account: Account
    deadline: Deadline
    tenant_limits: TenantLimits  # of its tenant
    schemas: tuple[str, ...] = ()  # schema hashes that the caller expects
    stage: str = "admitting"
    key: VersionKey | None = None  # set once the version is chosen
    queued_request: QueuedRequest | None = None  # set once its size is estimated
    dispatched_us: int = 0
    ceiling: TokenLimits = NO_TOKEN_LIMITS  # of its tenant, and the cap of a `cap-output` step
    token_reservation: TokenReservation | None = None  # part of its tenant's tokens per minute
    upstream: UpstreamRequest | None = None  # at the replica that the record names
    rejected_prompt_tokens: int = 0  # prompt tokens, counted by the last replica that refused it

    def split_key(self, entry: ModelEntry) -> str | None:
        """Return the key for traffic splits: the session's name, else the API key's id. None without a split."""
        if not entry.split:
            return None
        session = self.exchange.header(b"x-kelvin-session")
        return f"key {self.account.principal.key_id}" if session is None else f"session {read_session(session)}"

    @property
    def computed_tokens(self) -> int:
        """Tokens of prompt and output so far, as reported by the replica."""
        return self.account.counts.prompt_tokens + self.account.counts.completion_tokens

    def remaining_s(self) -> float:
        """Return the seconds until its deadline."""
        return self.deadline.remaining_s(time.monotonic())


def parse_inference_request(
    exchange: Exchange,
    request_route: RunInference,
    raw: bytes,
    principal: Principal,
    tenant_limits: TenantLimits,
    table: RoutingTable,
    deadline_s: float,
) -> InferenceRequest:
    """Parse a request whose body was read. Raises Refused(InvalidRequest), or Refused(ModelNotFound) if not callable.
    `tenant_limits` is the tenant's, `deadline_s` the installation's.
    """
    body, tenant_max_s = read_body(raw, request_route.path), tenant_limits.deadline_max_s
    reference = merge_references(
        request_route.target.model, body.model if request_route.model_name is None else request_route.model_name
    )
    entry = authorize_model(table, principal, request_route.target.tenant, reference)
    if body.stream and request_route.path in ROUTES_BY_KIND["embed"]:
        raise Refused(InvalidRequest("stream", "true", "embeddings are not streamed"))
    account = Account(
        request_id=exchange.request_id,
        principal=principal,
        model=entry.name_for(principal.tenant),
        stream=body.stream,
        started_at_us=exchange.arrived_at_us,
        timeline=Timeline(exchange.arrived_us),
        caller_trace=exchange.caller_trace,
    )
    return InferenceRequest(
        exchange,
        request_route.path,
        raw,
        body,
        read_priority_class(exchange.header(b"x-kelvin-priority"), tenant_limits.priority),
        read_affinity(principal.tenant, exchange.header(b"x-kelvin-session"), body.prefix),
        reference,
        entry,
        account,
        exchange.deadline(deadline_s if tenant_max_s is None else min(deadline_s, tenant_max_s)),
        tenant_limits,
        _schema_hashes(exchange, request_route, body),
    )


def _schema_hashes(exchange: Exchange, request_route: RunInference, body: RequestBody) -> tuple[str, ...]:
    """Return the schema hashes that a prediction names in its header and parameters. Each must match."""
    if request_route.model_name is None:
        return ()
    header = exchange.header(b"x-kelvin-schema-hash")
    hashes = (None if header is None else header.decode("latin-1"), body.schema_hash)
    return tuple(each for each in hashes if each is not None)


class UpstreamRequestFactory:
    """Makes the requests to replicas. `source` is the spool that will hold their records."""

    def __init__(self, replica_sessions: ReplicaSessions, source: str) -> None:
        self._replica_sessions = replica_sessions
        self._source = source

    def __repr__(self) -> str:
        return f"<UpstreamRequestFactory {self._source}>"

    def open_request(self, key: VersionKey, inference_request: InferenceRequest, replica: Replica) -> UpstreamRequest:
        """Return the request to one replica. Nothing is sent before the returned context manager is entered."""
        account = inference_request.account
        caller = account.principal
        remaining_ms = inference_request.deadline.remaining_ms(time.monotonic())
        guest = None if caller.tenant == key.tenant else caller.tenant
        degraded = None if account.applied_step is None else account.applied_step.record_value
        upstream_headers = UpstreamHeaders(
            account.request_id, caller.key_id, self._source, remaining_ms, replica.wanted_slots,
            inference_request.ceiling, guest, account.charge_id, degraded,
        )  # fmt: skip
        session = self._replica_sessions.ensure_session(replica.row.address)
        return UpstreamRequest(session, inference_request.path, inference_request.body, upstream_headers)
