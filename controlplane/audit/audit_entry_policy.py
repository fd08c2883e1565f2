"""The audit trail: what was done, for how long that is kept, and the chain that it hangs in.

A tenant's entries are numbered and chained. A digest stands for what an entry says, and the chain is over the digests,
with what stays of each: so an entry's words can go, and the chain still shows that it was there and when. The words
have a random salt with them, as a digest of few words could be guessed.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from controlplane.db.hash_chain_policy import AUDIT, ChainReader, genesis

Value = str | int | float | bool | tuple[str, ...] | dict[str, int] | None
Changed = Mapping[str, tuple[Value, Value]]  # a field's name -> what it was, what it is

DAY_S: Final = 86_400
MAX_DAYS: Final = 36_500


class AuditAction(StrEnum):
    """What was done. The word before the point says in which window it is kept."""

    TENANT_CREATED = "tenant.created"
    TENANT_SUSPENDED = "tenant.suspended"
    TENANT_RESUMED = "tenant.resumed"
    TENANT_LIMITED = "tenant.limited"
    TENANT_DELETED = "tenant.deleted"
    MODEL_DEPLOYED = "model.deployed"
    MODEL_SPLIT = "model.split"
    MODEL_SCALED = "model.scaled"
    MODEL_LADDER = "model.ladder"
    MODEL_RESTARTED = "model.restarted"
    MODEL_STOPPED = "model.stopped"
    MODEL_DELETED = "model.deleted"
    MODEL_GRANTED = "model.granted"
    MODEL_REVOKED = "model.revoked"
    VERSION_PUBLISHED = "version.published"
    VERSION_DELETED = "version.deleted"
    CACHE_EVICTED = "cache.evicted"
    KEY_CREATED = "key.created"
    KEY_ROTATED = "key.rotated"
    KEY_REVOKED = "key.revoked"
    MONTH_CLOSED = "month.closed"
    PRICES_CHANGED = "prices.changed"
    ACCESS_KEYS = "access.keys"
    ACCESS_GRANTS = "access.grants"
    ACCESS_AUDIT = "access.audit"
    AUDIT_KEPT = "audit.kept"
    AUDIT_EXPIRED = "audit.expired"


class AuditWindow(StrEnum):
    """For how long what is said is kept, by what it is about."""

    ACCESS = "access"  # who looked at what, request by request: the only one that can be zero
    KEYS = "keys"
    MODELS = "models"
    TENANTS = "tenants"
    BILLING = "billing"
    TRAIL = "trail"  # what was done to the trail itself: for ever, as the rest is judged by it


DEFAULT_DAYS: Final[Mapping[AuditWindow, int]] = {
    AuditWindow.ACCESS: 90, AuditWindow.KEYS: 365, AuditWindow.MODELS: 365, AuditWindow.TENANTS: 2557,
    AuditWindow.BILLING: 2557,
}  # fmt: skip
_WINDOWS: Final = {
    "access": AuditWindow.ACCESS, "key": AuditWindow.KEYS, "model": AuditWindow.MODELS, "version": AuditWindow.MODELS,
    "cache": AuditWindow.MODELS, "tenant": AuditWindow.TENANTS, "month": AuditWindow.BILLING,
    "prices": AuditWindow.BILLING, "audit": AuditWindow.TRAIL,
}  # fmt: skip


def window_of(action: str) -> AuditWindow:
    """Raises KeyError for what is no action."""
    return _WINDOWS[action.partition(".")[0]]


def min_days(window: AuditWindow) -> int:
    """What a window can be set to at least."""
    return 0 if window is AuditWindow.ACCESS else 1


@dataclass(frozen=True, slots=True)
class EntryBody:
    """What an entry says, and what goes when it expires."""

    actor_tenant: str
    actor: str
    action: str
    subject: str
    detail: str
    changed: str  # JSON of `Changed`
    request_id: str
    salt: str

    def digest(self) -> str:
        """SHA-256 of its canonical bytes, in hexadecimal digits."""
        fields = [getattr(self, name) for name in self.__dataclass_fields__]
        return hashlib.sha256(msgspec.json.encode([AUDIT, *fields])).hexdigest()


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A link of a tenant's chain. `body` is None where it expired."""

    link: int
    at_s: int
    window: str
    digest: str
    chain: str
    body: EntryBody | None


@dataclass(frozen=True, slots=True)
class ChainCheck:
    """A chain that was read: how many links hold, the last one's digest, and what is wrong behind it, if anything."""

    links: int
    chain: str
    expired: int  # of the links, whose words are gone
    difference: str | None


def chained_values(link: int, at_s: int, window: str, digest: str) -> tuple[int | str, ...]:
    """Return what the chain covers of an entry: what stays of it when its words go."""
    return link, at_s, window, digest


def verify(
    tenant: str,
    entries: Iterable[AuditEntry | str],
    written: tuple[int, str] | None,
    expired_before_s: Mapping[str, int],
) -> ChainCheck:
    """Read a chain in the order of its links, up to the first difference.

    A text in `entries` stands for an entry that can't be read, and says why. `written` is the chain's end as kept
    beside it. `expired_before_s` has for each window the second before which entries were let go, as entries of this
    chain say.
    """
    start = genesis(AUDIT, tenant)
    chain, expired = ChainReader(start), 0
    for entry in entries:
        if isinstance(entry, str):
            return ChainCheck(chain.links, chain.end.hex(), expired, entry)
        values = chained_values(entry.link, entry.at_s, entry.window, entry.digest)
        problem = (
            chain.check_link(entry.link)
            or _body_problem(entry, expired_before_s)
            or chain.advance(entry.link, values, entry.chain)
        )
        if problem is not None:
            return ChainCheck(chain.links, chain.end.hex(), expired, problem)
        expired += entry.body is None
    return ChainCheck(chain.links, chain.end.hex(), expired, chain.check_end(*written or (0, start.hex())))


def _body_problem(entry: AuditEntry, expired_before_s: Mapping[str, int]) -> str | None:
    if entry.body is not None and entry.body.digest() != entry.digest:
        return f"link {entry.link} ({entry.body.action}): what it says is not what was written"
    if entry.body is None and not _is_before(entry.at_s, expired_before_s.get(entry.window, 0)):
        return f"link {entry.link}: its words are gone, and nothing says that they expired"
    return None


def _is_before(at_s: object, end_s: int) -> bool:
    """Return whether an entry's time is before that. SQLite keeps a text in a column of numbers, too."""
    return isinstance(at_s, int) and at_s < end_s


def changed_fields(before: Mapping[str, Value], after: Mapping[str, Value]) -> dict[str, tuple[Value, Value]]:
    """The fields that changed, with what they were and are."""
    names = sorted(before.keys() | after.keys())
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def made(**fields: Value) -> dict[str, tuple[Value, Value]]:
    """Of something new: what it has, without what it lacks."""
    return {name: (None, value) for name, value in fields.items() if value not in (None, (), {})}
