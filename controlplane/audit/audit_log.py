"""The audit as its routes and its clock use it: notes what has no row of its own, expires, and sets windows."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Final

from msgspec import json
from sqlalchemy import Connection, select

from controlplane import dependencies
from controlplane.audit.audit_entry_policy import AuditAction, Changed, changed_fields, made
from controlplane.audit.audit_rows import (
    INSTALLATION_ACTOR,
    Actor,
    Event,
    audited_tenants,
    events,
    expire,
    record,
    set_window_days,
    window_days,
)
from controlplane.clock import Clock, ClockStepDetector
from controlplane.db import schema
from controlplane.db.database import Database
from controlplane.db.tenant_rows import find_tenant
from controlplane.ledger.policy.rating import PriceBook
from kelvin.contracts.accounting.audit_reports import AuditWindows
from kelvin.contracts.errors import NotFound, Refused
from kelvin.contracts.serving.control_messages import Principal
from kelvin.process.loops import record_error

log = logging.getLogger(__name__)

EXPIRY_INTERVAL_S: Final = 3600.0
RETRY_S: Final = 60.0


class AuditLog:
    """Over the database. What changes a row records itself, in that row's transaction."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def __repr__(self) -> str:
        return f"<AuditLog {self._database!r}>"

    async def add_entry(
        self,
        by: Actor,
        tenant: str,
        action: AuditAction,
        subject: str,
        changed: Changed | None = None,
        detail: str = "",
    ) -> None:
        """Durable on return; call it before what is noted is done, and only where that is not refused any more."""
        now_s = self._clock.wall_s()
        await self._database.write(
            lambda connection: record(connection, by, now_s, tenant, action, subject, detail, changed)
        )

    @asynccontextmanager
    async def record_around(
        self, by: Actor, tenant: str, action: AuditAction, subject: str, changed: Changed
    ) -> AsyncIterator[None]:
        """Around what somebody else does, or refuses: noted before it is asked for, so that nothing is done that is
        not here; and where it is refused, a second entry says so, by the failure's code.
        """
        await self.add_entry(by, tenant, action, subject, changed)
        try:
            yield
        except Refused as refused:
            await self.add_entry(by, tenant, action, subject, detail=f"refused: {refused.failure.code}")
            raise

    async def record_access(self, by: Actor, tenant: str, action: AuditAction) -> None:
        """An operator reads what is another tenant's: that tenant's to know."""
        if by.tenant != tenant and tenant:
            now_s = self._clock.wall_s()

            def write(connection: Connection) -> None:
                if _is_known(connection, tenant):
                    record(connection, by, now_s, tenant, action, tenant)

            await self._database.write(write)

    async def events(self, tenant: str, reader: Principal, limit: int, before: int | None) -> list[Event]:
        """As `audit.events`."""
        return await self._database.read(lambda connection: events(connection, tenant, reader, limit, before))

    async def windows(self, tenant: str) -> AuditWindows:
        """Raises Refused(NotFound)."""

        def read(connection: Connection) -> AuditWindows:
            if tenant:
                find_tenant(connection, tenant)
            return _windows(connection, tenant)

        return await self._database.read(read)

    async def keep(self, by: Actor, tenant: str, days: dict[str, int | None]) -> AuditWindows:
        """Set them; what is over then goes with the next expiry. Raises Refused: NotFound, InvalidRequest."""
        now_s = self._clock.wall_s()

        def write(connection: Connection) -> AuditWindows:
            if tenant:
                find_tenant(connection, tenant)
            before = _windows(connection, tenant)
            set_window_days(connection, tenant, days)
            after = _windows(connection, tenant)
            if changed := changed_fields(before.days, after.days):
                record(connection, by, now_s, tenant, AuditAction.AUDIT_KEPT, tenant, changed=changed)
            return after

        return await self._database.write(write)

    async def expire(self, by: Actor = INSTALLATION_ACTOR, tenant: str | None = None) -> dict[str, int]:
        """Empty expired entries of one tenant, or of all, each tenant in a transaction of its own. Their digests stay.
        Return how many were emptied, by tenant, without zeros.

        An unexpected error of one tenant does not stop the others if all are expired. Raises Refused: NotFound for a
        tenant that never was.
        """
        if tenant and not await self._database.read(lambda connection: _is_known(connection, tenant)):
            raise Refused(NotFound("tenant", tenant[:63]))
        tenants = [tenant] if tenant is not None else await self._database.read(audited_tenants)
        found: dict[str, int] = {}
        for each in tenants:
            now_s = self._clock.wall_s()
            try:
                count = await self._database.write(
                    lambda connection: expire(connection, by, each, now_s),  # noqa: B023
                    silence_s=dependencies.STATEMENT_S,  # one statement, for however many entries
                )
            except Refused:
                raise
            except Exception as error:
                if tenant is not None:
                    raise
                record_error(error, f"audit of {each or 'the installation'}")
                continue
            if count:
                found[each] = count
        return found

    async def record_prices(self, book: PriceBook) -> None:
        """What the installation charges from now on, where it is not what it charged."""
        digest = sha256(json.encode(book, order="deterministic")).hexdigest()[:16]
        c, now_s = schema.audit.c, self._clock.wall_s()
        query = (
            select(c.subject)
            .where(c.tenant == "", c.action == str(AuditAction.PRICES_CHANGED))
            .order_by(c.sequence.desc())
            .limit(1)
        )

        def write(connection: Connection) -> None:
            if connection.execute(query).scalar_one_or_none() != digest:
                changed = made(currency=book.currency)
                record(connection, INSTALLATION_ACTOR, now_s, "", AuditAction.PRICES_CHANGED, digest, changed=changed)

        await self._database.write(write)

    async def run(self) -> None:
        """Expire every hour. Ends by being cancelled.

        What is let go is gone. So the first time is after an hour, as is the next one after a step of the clock: it may
        be wrong until it is set.
        """
        steps, wait_s = ClockStepDetector(self._clock), EXPIRY_INTERVAL_S
        while True:
            await self._clock.sleep(wait_s)
            wait_s = EXPIRY_INTERVAL_S
            if by_us := steps.stepped_us():
                log.warning("the clock stepped; nothing of the audit expires for an hour", extra={"by_us": by_us})
                continue
            try:
                await self.expire()
            except Refused as refused:  # a full disk, a lock that another process holds
                log.error("the audit's old entries are still there", extra={"error": str(refused)})
                wait_s = RETRY_S


def _is_known(connection: Connection, tenant: str) -> bool:
    """Return whether there is such a tenant, or was one."""
    query = select(schema.tenants.c.tenant).where(schema.tenants.c.tenant == tenant)
    return connection.execute(query).first() is not None


def _windows(connection: Connection, tenant: str) -> AuditWindows:
    return AuditWindows(
        tenant=tenant, days={str(window): days for window, days in window_days(connection, tenant).items()}
    )
