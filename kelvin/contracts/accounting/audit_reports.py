"""What the audit's routes take and answer, beside its entries."""

from kelvin.contracts.wire import Wire


class AuditWindows(Wire, frozen=True):
    """`GET /admin/v1/audit/windows`: for how many days the words of audit entries are kept.

    `days` is by what an entry is about: access, keys, models, tenants or billing.
    """

    tenant: str
    days: dict[str, int]


class SetWindows(Wire, frozen=True):
    """Body of `PUT /admin/v1/audit/windows`: what is not given stays, null is the installation's again."""

    days: dict[str, int | None]


class Expired(Wire, frozen=True):
    """`POST /admin/v1/audit/expire`: entries whose words are gone now, by tenant."""

    entries: dict[str, int]


class AuditChain(Wire, frozen=True):
    """A tenant's chain, recomputed. `difference` names the first link that is not what was written."""

    tenant: str
    links: int  # that hold
    chain: str  # the digest of the last of them
    expired: int  # of them, whose words are gone
    difference: str | None = None


class AuditReport(Wire, frozen=True):
    """`GET /admin/v1/audit/verify`."""

    sound: bool
    chains: tuple[AuditChain, ...]
