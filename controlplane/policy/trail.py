"""The audit trail: what was done, for how long that is kept, and the chain that it hangs in.

A tenant's entries are numbered and chained. A digest stands for what an entry says, and the chain is over the digests,
with what stays of each: so an entry's words can go, and the chain still shows that it was there and when. The words
have a random salt with them, as a digest of few words could be guessed. Nothing here keeps who owns the database from
making a new chain: note its end elsewhere where that matters.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

Value = str | int | float | bool | tuple[str, ...] | dict[str, int] | None
Changed = Mapping[str, tuple[Value, Value]]  # a field's name -> what it was, what it is

DAY_S: Final = 86_400
MAX_DAYS: Final = 36_500
_FORMAT: Final = "kelvin audit 1"  # another one for any other choice of fields or encoding


class Action(StrEnum):
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


class Window(StrEnum):
    """For how long what is said is kept, by what it is about."""

    ACCESS = "access"  # who looked at what, request by request: the only one that can be zero
    KEYS = "keys"
    MODELS = "models"
    TENANTS = "tenants"
    BILLING = "billing"
    TRAIL = "trail"  # what was done to the trail itself: for ever, as the rest is judged by it


DEFAULT_DAYS: Final[Mapping[Window, int]] = {
    Window.ACCESS: 90, Window.KEYS: 365, Window.MODELS: 365, Window.TENANTS: 2557, Window.BILLING: 2557,
}  # fmt: skip
_WINDOWS: Final = {
    "access": Window.ACCESS, "key": Window.KEYS, "model": Window.MODELS, "version": Window.MODELS,
    "cache": Window.MODELS, "tenant": Window.TENANTS, "month": Window.BILLING, "prices": Window.BILLING,
    "audit": Window.TRAIL,
}  # fmt: skip


def window_of(action: str) -> Window:
    """Raises KeyError for what is no action."""
    return _WINDOWS[action.partition(".")[0]]


def least_days(window: Window) -> int:
    """What a window can be set to at least."""
    return 0 if window is Window.ACCESS else 1


@dataclass(frozen=True, slots=True)
class Said:
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
        return hashlib.sha256(msgspec.json.encode([_FORMAT, *fields])).hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """A link of a tenant's chain. `said` is None where it expired."""

    link: int
    at_s: int
    window: str
    digest: str
    chain: str
    said: Said | None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first link that is not what was written."""

    link: int
    detail: str


@dataclass(frozen=True, slots=True)
class Verified:
    """A chain that was read: how many links hold, the digest of the last one, and what comes after it, if anything."""

    links: int
    chain: str
    difference: Difference | None


def genesis(tenant: str) -> str:
    """What the first link follows. No two tenants have it in common: entries can't change places."""
    return hashlib.sha256(msgspec.json.encode([_FORMAT, tenant])).hexdigest()


def next_chain(before: str, link: int, at_s: int, window: str, digest: str) -> str:
    """Over the one before, and what stays of the entry when its words go."""
    return hashlib.sha256(bytes.fromhex(before) + msgspec.json.encode([link, at_s, window, digest])).hexdigest()


def verify(tenant: str, entries: Iterable[Entry], written: tuple[int, str], expired: Mapping[str, int]) -> Verified:
    """Read a chain in the order of its links. `written` is its end as kept beside it; `expired` says for each window
    before which second entries were let go, as entries of this chain say.
    """
    links, chain = 0, genesis(tenant)
    for entry in entries:
        problem = _problem(links, chain, entry, expired)
        if problem is not None:
            return Verified(links, chain, Difference(links + 1, problem))
        links, chain = entry.link, entry.chain
    if (links, chain) != written:
        detail = f"the chain ends with link {links}; {written[0]} links were written, or another last one"
        return Verified(links, chain, Difference(links + 1, detail))
    return Verified(links, chain, None)


def _problem(links: int, chain: str, entry: Entry, expired: Mapping[str, int]) -> str | None:
    if entry.link != links + 1:
        return f"link {entry.link} comes after link {links}: an entry is missing, or one too many"
    if entry.said is not None and entry.said.digest() != entry.digest:
        return f"link {entry.link} ({entry.said.action}): what it says is not what was written"
    if entry.said is None and entry.at_s >= expired.get(entry.window, 0):
        return f"link {entry.link}: its words are gone, and nothing says that they expired"
    if next_chain(chain, entry.link, entry.at_s, entry.window, entry.digest) != entry.chain:
        return f"link {entry.link}: it, or the one before it, is not what was written"
    return None


def differing(before: Mapping[str, Value], after: Mapping[str, Value]) -> dict[str, tuple[Value, Value]]:
    """The fields that changed, with what they were and are."""
    names = sorted(before.keys() | after.keys())
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def made(**fields: Value) -> dict[str, tuple[Value, Value]]:
    """Of something new: what it has, without what it lacks."""
    return {name: (None, value) for name, value in fields.items() if value not in (None, (), {})}
