"""Close a month: its prices and its bill stay what they are; what comes later is an adjustment of an open month."""

from collections.abc import Collection
from typing import Final

import msgspec
from sqlalchemy import Connection

from contracts.billing import ClosingReport
from contracts.errors import Conflict, Refused
from controlplane.billing import billing_report
from controlplane.closings import freeze, frozen_report, seal_of
from controlplane.policy.month import month_bounds_us
from controlplane.policy.rating import PriceBook

LATE_US: Final = 3_600_000_000  # records of the last minutes are on their way


def close_month(
    connection: Connection, book: PriceBook, tenant: str, month: str, *, live: Collection[str] | None, now_us: int
) -> ClosingReport:
    """Freeze it; again is harmless. Raises Refused: InvalidRequest for what is no month, Conflict for one not over."""
    _, end_us = month_bounds_us(month)
    if now_us < end_us + LATE_US:
        raise Refused(Conflict("month", f"{month} can be closed an hour after its end"))
    if frozen_report(connection, tenant, month) is None:
        report = billing_report(connection, book, tenant, month, live=live, now_us=now_us)
        freeze(connection, book, msgspec.structs.replace(report, closed_at_us=now_us))
    frozen = frozen_report(connection, tenant, month)
    assert frozen is not None
    return ClosingReport(report=frozen, chain=seal_of(connection, tenant, month))
