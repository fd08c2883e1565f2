"""`python -m controlplane.examine DATABASE [PASSWORD_FILE] SPOOLS`: read all rows of a tenant in a process of its own.

Nobody who waits for the control plane then waits for that, and what it takes of memory ends with it. An `Order` comes
on standard input; lines of JSON go out: `Read` now and then, last `Report` or `Failed`.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
from sqlalchemy.exc import DBAPIError

from contracts.audit import AuditReport
from contracts.billing import ReconcileReport, VerifyReport
from contracts.problem import WireFailure, to_wire
from contracts.wire import Wire, decode, encode
from controlplane.accounts import Surroundings
from controlplane.audit import links_of as audit_links
from controlplane.audit import verify_audit
from controlplane.policy.findings import Waiting
from controlplane.policy.rating import PriceBook
from controlplane.postgres_place import PostgresPlace, place_of
from controlplane.reconcile import reconcile
from controlplane.store import disposing, failure_of, reading_engine, snapshot
from controlplane.verify import links_of, months_of, verify_ledger
from spool.recovery import spools_of

NICENESS: Final = 10
TELL_S: Final = 0.2


class Order(Wire, frozen=True):
    """What to read, and what to hold it against."""

    kind: Literal["verify", "reconcile", "audit"]
    tenant: str
    month: str | None
    live: tuple[str, ...] | None
    now_us: int
    book: PriceBook


class Read(Wire, frozen=True, tag="read"):
    """How far it is."""

    rows: int
    of: int


class Report(Wire, frozen=True, tag="report"):
    """The end of it: the route's answer."""

    answer: msgspec.Raw


class Failed(Wire, frozen=True, tag="failed"):
    """The end of it without a report, such as where the database is away."""

    failure: WireFailure


class _Teller:
    """Says how far it is, a few times a second."""

    def __init__(self, of: int) -> None:
        self._of = of
        self._rows = 0
        self._next_s = time.monotonic() + TELL_S

    def __call__(self, rows: int) -> None:
        self._rows += rows
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + TELL_S
            _write(Read(rows=self._rows, of=max(self._of, self._rows)))


def examine(order: Order, database: Path | PostgresPlace, spools: Path) -> VerifyReport | ReconcileReport | AuditReport:
    """Over one snapshot."""
    with disposing(reading_engine(database)) as engine, snapshot(engine) as connection:
        if order.kind == "audit":
            return verify_audit(connection, order.tenant, _Teller(audit_links(connection, order.tenant)))
        months = [order.month] if order.month is not None else months_of(connection, order.tenant)
        tell = _Teller(links_of(connection, order.tenant, months))
        if order.kind == "verify":
            return verify_ledger(connection, order.tenant, order.month, tell)
        around = Surroundings(order.book, order.live, order.now_us, _waiting(spools))
        return reconcile(connection, order.tenant, order.month, around, tell)


def _waiting(spools: Path) -> Mapping[str, Waiting]:
    """By source, what its spool holds."""
    return {source: Waiting(*positions) for source, positions in spools_of(spools)}


def _write(line: Read | Report | Failed) -> None:
    """Whole at once; BrokenPipeError where nobody listens any more."""
    rest = memoryview(encode(line) + b"\n")
    while rest:
        rest = rest[os.write(sys.stdout.fileno(), rest) :]


def main() -> None:
    """Ends with the one who ordered it: then nobody reads what is written."""
    os.nice(NICENESS)
    order = decode(sys.stdin.buffer.read(), Order, what="order")
    try:
        *database, spools = sys.argv[1:]
        _write(Report(answer=msgspec.Raw(encode(examine(order, place_of(database), Path(spools))))))
    except BrokenPipeError:
        sys.exit(1)
    except DBAPIError as error:
        if (failure := failure_of(error)) is None:
            raise
        _write(Failed(failure=to_wire(failure)))


if __name__ == "__main__":
    main()
