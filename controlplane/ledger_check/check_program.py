"""Check a tenant's rows: `python -m controlplane.ledger_check.check_program DATABASE [PASSWORD_FILE] SPOOLS`.

It is a process of its own, so that no request to the control plane waits for it, and its memory is freed at its end. A
`CheckRequest` comes on standard input. Lines of JSON go out: `CheckProgress` now and then, at the end a `CheckResult`
or `CheckFailure`.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
from sqlalchemy.exc import DBAPIError

from controlplane.audit.audit_rows import count_entries as audit_links
from controlplane.audit.audit_rows import verify_audit
from controlplane.db.database import disposing, failure_of, reading_engine, snapshot
from controlplane.db.postgres_url import PostgresUrl, parse_database_arguments
from controlplane.ledger.consistency_checks import ExternalFacts
from controlplane.ledger.policy.discrepancies import SpoolPosition
from controlplane.ledger.policy.rating import PriceBook
from controlplane.ledger_check.ledger_verification import count_entries, list_months, verify_ledger
from controlplane.ledger_check.usage_audit import reconcile
from kelvin.contracts.accounting.audit_reports import AuditReport
from kelvin.contracts.accounting.billing_reports import ReconcileReport, VerifyReport
from kelvin.contracts.problem import WireFailure, to_wire
from kelvin.contracts.wire import Wire, decode, encode
from kelvin.spool.leftover_recovery import list_spools

NICENESS: Final = 10
PROGRESS_INTERVAL_S: Final = 0.2


class CheckRequest(Wire, frozen=True):
    """A check of a tenant, and facts to compare the ledger with."""

    kind: Literal["verify", "reconcile", "audit"]
    tenant: str
    month: str | None
    live: tuple[str, ...] | None
    now_us: int
    book: PriceBook


class CheckProgress(Wire, frozen=True, tag="read"):
    """Rows read so far, and about how many there are."""

    rows: int
    of: int


class CheckResult(Wire, frozen=True, tag="report"):
    """The last line: the body of the route's answer."""

    answer: msgspec.Raw


class CheckFailure(Wire, frozen=True, tag="failed"):
    """The last line if there is no report, for example because the database is away."""

    failure: WireFailure


class _ProgressWriter:
    """Writes the progress, a few times a second."""

    def __init__(self, expected_rows: int) -> None:
        self._expected_rows = expected_rows
        self._rows = 0
        self._next_s = time.monotonic() + PROGRESS_INTERVAL_S

    def __call__(self, rows: int) -> None:
        self._rows += rows
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + PROGRESS_INTERVAL_S
            _write(CheckProgress(rows=self._rows, of=max(self._expected_rows, self._rows)))


def examine(
    check: CheckRequest, database: Path | PostgresUrl, spools: Path
) -> VerifyReport | ReconcileReport | AuditReport:
    """Run the check on one snapshot of the database."""
    with disposing(reading_engine(database)) as engine, snapshot(engine) as connection:
        if check.kind == "audit":
            return verify_audit(connection, check.tenant, _ProgressWriter(audit_links(connection, check.tenant)))
        months = [check.month] if check.month is not None else list_months(connection, check.tenant)
        on_progress = _ProgressWriter(count_entries(connection, check.tenant, months))
        if check.kind == "verify":
            return verify_ledger(connection, check.tenant, check.month, on_progress)
        external_facts = ExternalFacts(check.book, check.live, check.now_us, _spool_positions(spools))
        return reconcile(connection, check.tenant, check.month, external_facts, on_progress)


def _spool_positions(spools: Path) -> Mapping[str, SpoolPosition]:
    """Return the position of each source's spool."""
    return {source: SpoolPosition(*positions) for source, positions in list_spools(spools)}


def _write(line: CheckProgress | CheckResult | CheckFailure) -> None:
    """Write a whole line. Raises BrokenPipeError if the control plane has gone."""
    rest = memoryview(encode(line) + b"\n")
    while rest:
        rest = rest[os.write(sys.stdout.fileno(), rest) :]


def main() -> None:
    """Read the request and run the check. Ends early once the control plane no longer reads the output."""
    os.nice(NICENESS)
    check = decode(sys.stdin.buffer.read(), CheckRequest, field="order")
    try:
        *database, spools = sys.argv[1:]
        _write(
            CheckResult(answer=msgspec.Raw(encode(examine(check, parse_database_arguments(database), Path(spools)))))
        )
    except BrokenPipeError:
        sys.exit(1)
    except DBAPIError as error:
        if (failure := failure_of(error)) is None:
            raise
        _write(CheckFailure(failure=to_wire(failure)))


if __name__ == "__main__":
    main()
