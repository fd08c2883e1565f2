"""Whether all that is chained holds: every month of every tenant's ledger, and every audit. Reads every row."""

from dataclasses import dataclass

from sqlalchemy import Connection, select

from contracts.audit import AuditChain
from contracts.backup import RestoredChain
from controlplane import schema
from controlplane.audit_verify import ALL, verify_audit
from controlplane.ledger_schema import chains
from controlplane.verify import verify_ledger


@dataclass(frozen=True, slots=True)
class Soundness:
    """Every chain, recomputed from its rows."""

    ledger: tuple[RestoredChain, ...]
    audits: tuple[AuditChain, ...]

    @property
    def fault(self) -> str | None:
        """The first that does not hold, in words; None where all do."""
        for month in self.ledger:
            if month.difference is not None:
                return f"the ledger of {month.tenant} {month.month} is not sound: {month.difference}"
        for audit in self.audits:
            if audit.difference is not None:
                return f"the audit of {audit.tenant or 'the installation'} is not sound: {audit.difference}"
        return None


def soundness_of(connection: Connection) -> Soundness:
    """In one transaction."""
    return Soundness(_ledger(connection), verify_audit(connection, ALL).chains)


def _ledger(connection: Connection) -> tuple[RestoredChain, ...]:
    """Every month of every tenant; "" is the platform's own."""
    owners = {*connection.execute(select(schema.tenants.c.tenant)).scalars(), ""}
    owners |= set(connection.execute(select(chains.c.tenant)).scalars())
    found = []
    for tenant in sorted(owners):
        report = verify_ledger(connection, tenant, None)
        for month in report.months:
            difference = next((f"{each.subject}: {each.detail}" for each in month.differences), None)
            found.append(
                RestoredChain(
                    tenant=tenant, month=month.month, links=month.links, chain=month.chain, difference=difference
                )
            )
        found += [
            RestoredChain(tenant=tenant, month="", links=0, chain="", difference=f"{each.subject}: {each.detail}")
            for each in report.replicas
        ]
    return tuple(found)
