"""Define audit entries, how long they are kept, and how a chain of them is verified. Pure.

A tenant's entries are numbered and chained. An entry's body has a digest, and the chain covers the digests and the
fields that are never deleted. So a body can expire, and the chain still shows that the entry existed and when. Each
body has a random salt, because a digest of few words could be guessed.
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
    """Actions that are recorded. The word before the dot decides in which retention window an entry falls."""

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
    """Retention windows: how long bodies are kept, by the subject of the entries."""

    ACCESS = "access"  # reads of a tenant's data, one entry per request: the only window that can be zero
    KEYS = "keys"
    MODELS = "models"
    TENANTS = "tenants"
    BILLING = "billing"
    TRAIL = "trail"  # changes of the audit log itself: kept for ever, because they explain missing bodies


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
    """Return the window of an action. Raises KeyError for an unknown action."""
    return _WINDOWS[action.partition(".")[0]]


def min_days(window: AuditWindow) -> int:
    """Return the smallest number of days that the window can be set to."""
    return 0 if window is AuditWindow.ACCESS else 1


@dataclass(frozen=True, slots=True)
class EntryBody:
    """The part of an entry that is deleted when it expires."""

    actor_tenant: str
    actor: str
    action: str
    subject: str
    detail: str
    changed: str  # JSON of `Changed`
    request_id: str
    salt: str

    def digest(self) -> str:
        """Return the SHA-256 of the body's canonical bytes, in hexadecimal digits."""
        fields = [getattr(self, name) for name in self.__dataclass_fields__]
        return hashlib.sha256(msgspec.json.encode([AUDIT, *fields])).hexdigest()


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A link of a tenant's chain. `body` is None if it has expired."""

    link: int
    at_s: int
    window: str
    digest: str
    chain: str
    body: EntryBody | None


@dataclass(frozen=True, slots=True)
class ChainCheck:
    """Result of reading a chain: how many links hold, the last one's digest, and the first difference after it."""

    links: int
    chain: str
    expired: int  # links whose body has expired
    difference: str | None


def chained_values(link: int, at_s: int, window: str, digest: str) -> tuple[int | str, ...]:
    """Return the fields of an entry that the chain covers. They stay when its body expires."""
    return link, at_s, window, digest


def verify(
    tenant: str,
    entries: Iterable[AuditEntry | str],
    written: tuple[int, str] | None,
    expired_before_s: Mapping[str, int],
) -> ChainCheck:
    """Read a chain in the order of its links, up to the first difference.

    A text in `entries` stands for an entry that can't be read, and says why. `written` is the stored end of the chain.
    `expired_before_s` has, for each window, the second before which bodies expired according to entries of this chain.
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
        return f"link {entry.link} ({entry.body.action}): its body is not what was written"
    if entry.body is None and not _is_before(entry.at_s, expired_before_s.get(entry.window, 0)):
        return f"link {entry.link}: its body is gone, and no entry says that it expired"
    return None


def _is_before(at_s: object, end_s: int) -> bool:
    """Return whether the entry's time is before `end_s`. SQLite may hold a text in a column of numbers."""
    return isinstance(at_s, int) and at_s < end_s


def changed_fields(before: Mapping[str, Value], after: Mapping[str, Value]) -> dict[str, tuple[Value, Value]]:
    """Return the fields that changed, each with its old and its new value."""
    names = sorted(before.keys() | after.keys())
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def created_fields(**fields: Value) -> dict[str, tuple[Value, Value]]:
    """Return the fields of something new, without empty ones, as changes from None."""
    return {name: (None, value) for name, value in fields.items() if value not in (None, (), {})}
