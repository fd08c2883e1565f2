"""Requests and responses of the audit routes. Audit entries themselves are defined elsewhere."""

from kelvin.contracts.wire import Wire


class AuditWindows(Wire, frozen=True):
    """Response of `GET /admin/v1/audit/windows`: how many days the text of audit entries is kept.

    The keys of `days` are the subjects of entries: access, keys, models, tenants or billing.
    """

    tenant: str
    days: dict[str, int]


class SetWindows(Wire, frozen=True):
    """Body of `PUT /admin/v1/audit/windows`. A subject that is left out keeps its value; null restores the default."""

    days: dict[str, int | None]


class Expired(Wire, frozen=True):
    """Response of `POST /admin/v1/audit/expire`: how many entries lost their text, by tenant."""

    entries: dict[str, int]


class AuditChain(Wire, frozen=True):
    """The recomputed hash chain of a tenant. `difference` names the first link that was altered."""

    tenant: str
    links: int  # links that are intact
    chain: str  # digest of the last intact link
    expired: int  # intact links whose text has expired
    difference: str | None = None


class AuditReport(Wire, frozen=True):
    """Response of `GET /admin/v1/audit/verify`: every tenant's chain."""

    sound: bool
    chains: tuple[AuditChain, ...]
