"""Read a tenant's chain of the audit out of the database, row by row, and say whether it holds."""

from collections.abc import Iterator
from typing import Final

from sqlalchemy import Connection, func, select

from contracts.audit import AuditChain, AuditReport
from contracts.wire import decoder
from controlplane import schema
from controlplane.audit import SAID
from controlplane.audit_expiry import tenants_of
from controlplane.policy.trail import Action, Entry, Said, genesis, verify
from controlplane.store import streamed
from controlplane.verify import Tell

ALL: Final = "*"  # no tenant's name
_ROWS: Final = 2_000
_KEPT: Final = ("link", "at_s", "window_name", "digest", "chain", "expired_at_s")


def verify_audit(connection: Connection, tenant: str, tell: Tell = lambda rows: None) -> AuditReport:
    """The tenant's chain, or every one that there is."""
    tenants = tenants_of(connection) if tenant == ALL else [tenant]
    found = tuple(verify_chain(connection, each, tell) for each in tenants)
    return AuditReport(sound=all(each.difference is None for each in found), chains=found)


def verify_chain(connection: Connection, tenant: str, tell: Tell = lambda rows: None) -> AuditChain:
    """Up to the first difference."""
    chains = schema.audit_chains
    end = connection.execute(select(chains.c.links, chains.c.chain).where(chains.c.tenant == tenant)).first()
    written = (0, genesis(tenant)) if end is None else (end.links, end.chain)
    reading = _Reading(connection, tenant, tell)
    found = verify(tenant, reading.entries(), written, reading.let_go())
    return AuditChain(
        tenant=tenant,
        links=found.links,
        chain=found.chain,
        expired=reading.expired - (found.difference is not None and reading.last_expired),
        difference=None if found.difference is None else found.difference.detail,
    )


def links_of(connection: Connection, tenant: str) -> int:
    """About how many rows there are to read."""
    count = select(func.count()).select_from(schema.audit)
    return int(
        connection.execute(count if tenant == ALL else count.where(schema.audit.c.tenant == tenant)).scalar_one()
    )


class _Reading:
    """One pass over the rows."""

    def __init__(self, connection: Connection, tenant: str, tell: Tell) -> None:
        self._connection = connection
        self._tenant = tenant
        self._tell = tell
        self.expired = 0
        self.last_expired = False

    def let_go(self) -> dict[str, int]:
        """By window, before which second entries were let go."""
        c = schema.audit.c
        query = select(c.subject, c.changed).where(c.tenant == self._tenant, c.action == str(Action.AUDIT_EXPIRED))
        found: dict[str, int] = {}
        for subject, changed in self._connection.execute(query):
            before_s = decoder(dict[str, tuple[None, int]]).decode(changed)["before_s"][1]
            found[subject] = max(found.get(subject, 0), before_s)
        return found

    def entries(self) -> Iterator[Entry]:
        table = schema.audit
        query = (
            select(*(table.c[name] for name in (*_KEPT, *SAID)))
            .where(table.c.tenant == self._tenant)
            .order_by(table.c.link)
        )
        for number, row in enumerate(streamed(self._connection, query, _ROWS), 1):
            link, at_s, window, digest, chain, expired_at_s = row[: len(_KEPT)]
            self.last_expired = expired_at_s is not None
            self.expired += self.last_expired
            yield Entry(link, at_s, window, digest, chain, None if self.last_expired else Said(*row[len(_KEPT) :]))
            if number % _ROWS == 0:
                self._tell(_ROWS)
