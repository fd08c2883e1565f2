"""One completion under way: what is asked, of which model, and its deadline. An invalid request leaves no record."""

import time
from typing import Final

import msgspec

from activator.account import Account
from activator.exchange import Exchange
from activator.keys import VersionKey
from activator.line import Replica
from activator.policy.affinity import Affinity, read_affinity, read_session
from activator.policy.ask import Ask, Rank, read_rank
from activator.policy.body import Body, read_body
from activator.policy.traffic import ModelEntry, which_model
from activator.proxy import Told, Upstream, Upstreams
from activator.rates import Reservation
from activator.routes import Complete
from activator.table import Table, reach
from contracts.ceiling import NO_CEILING, Ceiling
from contracts.control import Principal, TenantLimits
from contracts.deadline import Deadline
from contracts.errors import InvalidRequest, Refused
from contracts.kinds import PATHS
from contracts.names import ModelReference
from contracts.timeline import Timeline

WAITING: Final = frozenset({"restoring", "queued"})  # stages without a slot


class Call(msgspec.Struct):
    """What was asked, and how far it has come."""

    exchange: Exchange
    path: str
    body: bytes
    wanted: Body  # what is read of it
    rank: Rank
    affinity: Affinity | None
    reference: ModelReference
    entry: ModelEntry
    account: Account
    deadline: Deadline
    own: TenantLimits  # its tenant's
    schemas: tuple[str, ...] = ()  # hashes that the caller expects
    stage: str = "admitting"
    key: VersionKey | None = None  # once it is known which version answers
    ask: Ask | None = None  # once it is known what it takes
    dispatched_us: int = 0
    ceiling: Ceiling = NO_CEILING  # what its tenant may use of what the version allows
    reserved: Reservation | None = None  # of its tenant's tokens for this minute
    upstream: Upstream | None = None  # at the replica that the record will name
    encoded_in_vain: int = 0  # tokens of the prompt, by the last replica that refused it

    def who_of(self, entry: ModelEntry) -> str | None:
        """By whom a version is chosen where several share a model: its session's name, else its key. None: only one."""
        if not entry.split:
            return None
        session = self.exchange.header(b"x-kelvin-session")
        return f"key {self.account.principal.key_id}" if session is None else f"session {read_session(session)}"

    @property
    def computed_tokens(self) -> int:
        """Of prompt and answer so far, as the replica said."""
        return self.account.seen.prompt_tokens + self.account.seen.completion_tokens

    def remaining_s(self) -> float:
        """Seconds until its deadline."""
        return self.deadline.remaining_s(time.monotonic())


def open_call(
    exchange: Exchange,
    asked: Complete,
    raw: bytes,
    principal: Principal,
    own: TenantLimits,
    table: Table,
    deadline_s: float,
) -> Call:
    """Of a request whose body was read. Raises Refused: InvalidRequest; ModelNotFound for what the caller may not call.

    `own` is the tenant's, `deadline_s` the installation's.
    """
    body, most_s = read_body(raw, asked.path), own.deadline_max_s
    reference = which_model(asked.target.model, body.model if asked.named is None else asked.named)
    entry = reach(table, principal, asked.target.tenant, reference)
    if body.stream and asked.path in PATHS["embed"]:
        raise Refused(InvalidRequest("stream", "true", "embeddings are not streamed"))
    account = Account(
        request_id=exchange.request_id,
        principal=principal,
        model=entry.name_for(principal.tenant),
        stream=body.stream,
        started_at_us=exchange.arrived_at_us,
        timeline=Timeline(exchange.arrived_us),
        caller=exchange.caller,
    )
    return Call(
        exchange,
        asked.path,
        raw,
        body,
        read_rank(exchange.header(b"x-kelvin-priority"), own.priority),
        read_affinity(principal.tenant, exchange.header(b"x-kelvin-session"), body.prefix),
        reference,
        entry,
        account,
        exchange.deadline(deadline_s if most_s is None else min(deadline_s, most_s)),
        own,
        _schemas(exchange, asked, body),
    )


def _schemas(exchange: Exchange, asked: Complete, body: Body) -> tuple[str, ...]:
    """Of a prediction, the hashes of schemas that header and parameters name: each must hold."""
    if asked.named is None:
        return ()
    header = exchange.header(b"x-kelvin-schema-hash")
    given = (None if header is None else header.decode("latin-1"), body.schema_hash)
    return tuple(each for each in given if each is not None)


class Sender:
    """Send a request to one replica of its version; `source` is the spool that owes the records."""

    def __init__(self, upstreams: Upstreams, source: str) -> None:
        self._upstreams = upstreams
        self._source = source

    def __repr__(self) -> str:
        return f"<Sender {self._source}>"

    def send(self, key: VersionKey, call: Call, replica: Replica) -> Upstream:
        """`async with` it."""
        account = call.account
        caller = account.principal
        remaining_ms = call.deadline.remaining_ms(time.monotonic())
        guest = None if caller.tenant == key.tenant else caller.tenant
        degraded = None if account.degraded is None else account.degraded.recorded
        told = Told(
            account.request_id, caller.key_id, self._source, remaining_ms, replica.wants, call.ceiling, guest,
            account.once, degraded,
        )  # fmt: skip
        return self._upstreams.send(replica, call.path, call.body, told)
