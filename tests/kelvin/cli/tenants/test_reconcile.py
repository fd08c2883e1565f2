"""`kelvin billing verify` and `reconcile` poll until the report is ready, and print the result."""

import json

import httpx
import msgspec
from click.testing import CliRunner, Result

from kelvin.cli.tenants.billing_commands import billing_command
from kelvin.contracts.accounting.billing_reports import (
    ChainReport,
    Compared,
    Difference,
    Examining,
    ReconcileReport,
    VerifyReport,
)
from kelvin.contracts.wire import encode
from tests.kelvin.cli_targets import Installation, installation_answering

MISSING = Difference(
    kind="requests_missing",
    subject="rt-1",
    detail="it served 3 requests; 2 request records name it",
    cause="the replica was killed by SIGKILL",
    ids=("req_a", "req_b"),
    requests=1,
    tokens=2048,
    device_us=1_250_000,
    amount_micros=3_072,
)
HOLE = Difference(
    kind="sequence_hole",
    subject="activator-1",
    detail="record 3 of this source never arrived; record 4 did",
    requests=1,
    tokens=None,
    device_us=None,
    amount_micros=None,
)
SHORT = Difference(
    kind="charged_by_receipt",
    subject="req_c",
    detail="charged for the 128 tokens that were acknowledged to replica rt-2",
    fails=False,
    ids=("req_c",),
    tokens=64,
    amount_micros=96,
)
AGREES = ReconcileReport(
    tenant="acme",
    months=("2026-10", "2026-11"),
    currency="EUR",
    agrees=True,
    compared=Compared(rows=12_345, replicas=2, served=7, recorded=7, lived_us=20_000_000, sources=3),
    differences=(SHORT,),
)
DIFFERS = msgspec.structs.replace(AGREES, agrees=False, differences=(MISSING, HOLE, SHORT), more=4)
SOUND = VerifyReport(
    tenant="acme",
    sound=True,
    months=(ChainReport(month="2026-11", links=9, chain="c" * 64, closed=False, differences=()),),
)


def run(report: ReconcileReport | VerifyReport, *words: str) -> tuple[Result, Installation]:
    """Run the command against an installation that needs two polls."""
    not_yet = (httpx.Response(202, content=encode(Examining(rows=rows, of=9))) for rows in (1, 2))
    installation = installation_answering(*not_yet, report)
    return CliRunner().invoke(billing_command, [*words], obj=installation), installation


def test_reconcile_polls_until_the_report_is_ready() -> None:
    """Each poll has the same path and query parameters."""
    result, installation = run(AGREES, "reconcile", "--tenant", "acme", "--month", "2026-11")
    assert result.exit_code == 0
    assert [request.url.path for request in installation.requests] == ["/admin/v1/billing/reconcile"] * 3
    assert {tuple(request.url.params.items()) for request in installation.requests} == {
        (("tenant", "acme"), ("month", "2026-11"))
    }
    result, installation = run(SOUND, "verify", "--tenant", "acme")
    assert "acme 2026-11 (open): 9 links hold" in result.output
    assert [dict(request.url.params) for request in installation.requests] == [{"tenant": "acme"}] * 3


def test_agreeing_accounts_print_a_verdict() -> None:
    """The output has the compared numbers, the known inexact charges and the verdict."""
    result, _ = run(AGREES, "reconcile")
    assert result.exit_code == 0
    for text in (
        "acme, 2026-10, 2026-11:",
        "requests: 7 by 2 replicas, 7 recorded",
        "rows behind the totals: 12,345",
        "known: charged_by_receipt: req_c: charged for the 128 tokens",
        "  at most 64 tokens, EUR 0.000096",
        "the accounts agree",
    ):
        assert text in result.output


def test_accounts_that_differ_are_exit_code_2() -> None:
    """Each difference has its size, cause and requests. Unknown sizes are printed as unknown."""
    result, _ = run(DIFFERS, "reconcile")
    assert result.exit_code == 2
    for text in (
        "requests_missing: rt-1: it served 3 requests; 2 request records name it",
        "  at most 1 request, 2,048 tokens, 1.250 s, EUR 0.003072; the replica was killed by SIGKILL",
        "  requests: req_a, req_b",
        "  at most 1 request; unknown: tokens, device time, money",
        "and 4 more differences",
        "the accounts DIFFER",
    ):
        assert text in result.output


def test_json_output_is_the_unchanged_response() -> None:
    """The response is printed unchanged, with the same exit code."""
    result, _ = run(DIFFERS, "reconcile", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (2, json.loads(encode(DIFFERS)))
