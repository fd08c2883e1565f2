"""`kelvin billing`: print a month's bill, close it, and verify the ledger. Exit code 2 if a check fails."""

import csv
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from http import HTTPStatus
from typing import Final, TextIO

import click
from msgspec import UNSET
from rich.console import Console
from rich.table import Table

from kelvin.cli.base.api_client import CommandFailed, poll_report
from kelvin.cli.base.tables import print_table
from kelvin.contracts.accounting.billing_reports import (
    BillingReport,
    BillLine,
    ClosingReport,
    Compared,
    Difference,
    ReconcileReport,
    VerifyReport,
)
from kelvin.contracts.wire import decode

UNBALANCED_EXIT: Final = 2
CSV_COLUMNS: Final = (
    "section", "item", "model", "device_class", "since", "quantity", "unit", "price_micros", "per", "amount_micros",
    "adjusts",
)  # fmt: skip


@click.group("billing")
def billing_command() -> None:
    """Show usage and costs, close months, verify the ledger."""


@billing_command.command("report")
@click.option("--tenant", help="Tenant; needs a key of that tenant. [default: the key's own]")
@click.option("--month", metavar="YYYY-MM", help="Calendar month, UTC. [default: the current one]")
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@click.pass_context
def report_command(context: click.Context, tenant: str | None, month: str | None, form: str) -> None:
    """Print requests, tokens, device time and cost of a month. Exits with 2 if the ledger does not balance: records are
    lost, double or contradictory.
    """
    chosen = month or datetime.now(UTC).strftime("%Y-%m")
    with context.obj.client() as client, hint_own_key(tenant, "billing:read"):
        raw = client.get("/admin/v1/billing/report", params=month_query(tenant, chosen)).content
    report = decode(raw, BillingReport, field="answer of the control plane")
    if form == "json":
        click.echo(raw.decode())
    elif form == "csv":
        write_csv(report, sys.stdout)
    else:
        print_tables(report, Console(emoji=False))
    if not report.balance.balanced:
        for line in problem_lines(report):
            click.echo(line, err=True)
        context.exit(UNBALANCED_EXIT)


@billing_command.command("close")
@click.option("--tenant", help="Tenant; needs a key of that tenant. [default: the key's own]")
@click.option("--month", metavar="YYYY-MM", required=True, help="Calendar month, UTC; it ended an hour ago or more.")
@click.pass_context
def close_command(context: click.Context, tenant: str | None, month: str) -> None:
    """Freeze a month's prices and bill. Later records become adjustments of another month. Prints the digest of the
    closed month; note it elsewhere. Exits with 2 if the month does not balance.
    """
    with context.obj.client() as client, hint_own_key(tenant, "admin"):
        answer = client.post("/admin/v1/billing/close", json={"tenant": tenant, "month": month})
    closing = decode(answer.content, ClosingReport, field="answer of the control plane")
    total = f"{closing.report.currency} {format_money(closing.report.total_micros)}"
    click.echo(f"{closing.report.tenant} {month} is closed: {total}, chain {closing.chain}")
    if not closing.report.balance.balanced:
        for line in problem_lines(closing.report):
            click.echo(line, err=True)
        context.exit(UNBALANCED_EXIT)


@billing_command.command("verify")
@click.option("--tenant", help="Tenant; needs a key of that tenant. [default: the key's own]")
@click.option("--month", metavar="YYYY-MM", help="Calendar month, UTC. [default: all]")
@click.pass_context
def verify_command(context: click.Context, tenant: str | None, month: str | None) -> None:
    """Recompute chain, totals and closed bills. They are recomputed from the ledger's rows. Exits with 2 if a row was
    changed, removed, added or moved, and names the first difference of each month.
    """
    with context.obj.client() as client, hint_own_key(tenant, "billing:read"):
        raw = poll_report(client, "/admin/v1/billing/verify", month_query(tenant, month))
    report = decode(raw, VerifyReport, field="answer of the control plane")
    for chain in report.months:
        state = "closed" if chain.closed else "open"
        click.echo(f"{report.tenant} {chain.month} ({state}): {chain.links:,} links hold, chain {chain.chain}")
        for difference in chain.differences:
            click.echo(f"{report.tenant} {chain.month}: {difference.subject}: {difference.detail}", err=True)
    for difference in report.replicas:
        click.echo(f"{report.tenant}: {difference.subject}: {difference.detail}", err=True)
    if not report.sound:
        context.exit(UNBALANCED_EXIT)


def problem_lines(report: BillingReport) -> list[str]:
    """Return a sentence for each problem."""
    lines = [f"{problem.kind}: {problem.subject}: {problem.detail}" for problem in report.balance.problems]
    if report.balance.more:
        lines.append(f"and {report.balance.more} more problems")
    return [f"the ledger of {report.tenant} does not balance for {report.month}", *lines]


def write_csv(report: BillingReport, out: TextIO) -> None:
    """Write all sections into one table for programs: requests, degraded, tokens, device, lines, total, problems."""
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(CSV_COLUMNS)
    for outcome, count in sorted(report.requests.items()):
        rows.writerow(["requests", outcome, "", "", "", count, "request", "", "", "", ""])
    for step, count in _degraded_counts(report):
        rows.writerow(["degraded", step, "", "", "", count, "request", "", "", "", ""])
    for item in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        rows.writerow(["tokens", item, "", "", "", getattr(report, item), "token", "", "", "", ""])
    for use in report.device:
        for item in ("restore_us", "active_us", "idle_us"):
            rows.writerow(
                ["device", item[:-3], "", use.device_class, "", getattr(use, item), "device_us", "", "", "", ""]
            )
    for line in report.lines:
        rows.writerow(
            ["line", line.item, line.model, line.device_class or "", line.since, line.quantity, line.unit,
             line.price_micros, line.per, line.amount_micros, line.adjusts or ""]
        )  # fmt: skip
    rows.writerow(["total", report.currency, "", "", "", "", "", "", "", report.total_micros, ""])
    for problem in report.balance.problems:
        rows.writerow(["problem", f"{problem.kind}: {problem.subject}: {problem.detail}", *[""] * 9])


def _degraded_counts(report: BillingReport) -> list[tuple[str, int]]:
    return [] if report.degraded is UNSET else sorted(report.degraded.items())


def _describe_line(line: BillLine) -> tuple[str, str, str]:
    """Return item, quantity and price, short enough for a terminal of 80 columns."""
    if line.device_class is None:
        return (
            line.item.replace("_", " "),
            f"{line.quantity:,}",
            f"{format_money(line.price_micros)} / {_short_count(line.per)}",
        )
    item = f"{line.item.removeprefix('device_')} {line.device_class}"
    return (
        item,
        f"{format_seconds(line.quantity)} s",
        f"{format_money(line.price_micros)} / {_short_count(line.per // 1_000_000)} s",
    )


def _short_count(count: int) -> str:
    return f"{count // 1_000_000}M" if count and count % 1_000_000 == 0 else f"{count:,}"


def print_tables(report: BillingReport, console: Console) -> None:
    """Print the report as tables for a terminal."""
    used = Table("", "", title=f"{report.tenant}, {report.month}: used", show_header=False)
    for outcome, count in sorted(report.requests.items()):
        used.add_row(f"requests, {outcome}", f"{count:,}")
    for step, count in _degraded_counts(report):
        used.add_row(f"  of them less than asked, {step}", f"{count:,}")
    used.add_row("prompt tokens", f"{report.prompt_tokens:,}")
    used.add_row("  of them cached", f"{report.cached_tokens:,}")
    used.add_row("completion tokens", f"{report.completion_tokens:,}")
    used.columns[1].justify = "right"
    print_table(used, console)
    device = Table("device", "replicas", "restore s", "active s", "idle s", title="device time")
    for use in report.device:
        times = (format_seconds(use.restore_us), format_seconds(use.active_us), format_seconds(use.idle_us))
        device.add_row(use.device_class, str(use.lifetimes), *times)
    bill = Table("model", "item", "quantity", "price", "amount", title=f"bill, {report.currency}")
    dates = {line.since for line in report.lines}
    for line in report.lines:
        item, quantity, price = _describe_line(line)
        dated = f"{item}, from {line.since}" if len(dates) > 1 else item
        dated = f"{dated}, adjusts {line.adjusts}" if line.adjusts else dated
        bill.add_row(line.model, dated, quantity, price, format_money(line.amount_micros))
    bill.add_section()
    bill.add_row("total", "", "", "", format_money(report.total_micros))
    for table, numbers in ((device, range(1, 5)), (bill, (2, 3, 4))):
        for number in numbers:
            table.columns[number].justify = "right"
        print_table(table, console)
    if report.open_runtimes:
        console.print(
            f"replicas without a recorded end, charged once it is recorded: {', '.join(report.open_runtimes)}",
            soft_wrap=True,
        )
    if report.closed_at_us is not None:
        closed_at = datetime.fromtimestamp(report.closed_at_us / 1e6, UTC)
        console.print(f"closed at {closed_at:%Y-%m-%d %H:%M} UTC", soft_wrap=True)
    verdict = "balanced" if report.balance.balanced else "DOES NOT BALANCE"
    compared = f"{report.balance.lifetimes} replicas, {report.balance.sources} sources compared"
    console.print(f"ledger: {verdict}; {compared}", soft_wrap=True)


@billing_command.command("reconcile")
@click.option("--tenant", help="Tenant; needs a key of that tenant. [default: the key's own]")
@click.option("--month", metavar="YYYY-MM", help="Calendar month, UTC. [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def reconcile_command(context: click.Context, tenant: str | None, month: str | None, as_json: bool) -> None:
    """Compare requests, lifetimes, sources and totals.

    Names each difference with its size. Exits with 2 if two accounts differ that must agree. Known differences (charged
    by the last acknowledgement, or still on their way) are no failure.
    """
    with context.obj.client() as client, hint_own_key(tenant, "billing:read"):
        raw = poll_report(client, "/admin/v1/billing/reconcile", month_query(tenant, month))
    report = decode(raw, ReconcileReport, field="answer of the control plane")
    if as_json:
        click.echo(raw.decode())
    else:
        for line in lines(report):
            click.echo(line)
    if not report.agrees:
        context.exit(UNBALANCED_EXIT)


def lines(report: ReconcileReport) -> Iterator[str]:
    """Yield text lines: what was compared, each difference, the verdict."""
    compared = report.compared
    yield f"{report.tenant}, {', '.join(report.months) or 'no month'}:"
    yield from _compared_lines(compared)
    for difference in report.differences:
        yield f"{'' if difference.fails else 'known: '}{difference.kind}: {difference.subject}: {difference.detail}"
        size = _difference_size(difference, report.currency)
        yield f"  {'; '.join(part for part in (size, difference.cause) if part)}"
        if difference.ids and difference.ids != (difference.subject,):
            yield f"  requests: {', '.join(difference.ids)}"
    if report.more:
        yield f"and {report.more:,} more differences"
    yield f"the accounts {'agree' if report.agrees else 'DIFFER'}"


def _compared_lines(compared: Compared) -> Iterator[str]:
    yield f"  requests: {compared.served:,} by {compared.replicas:,} replicas, {compared.recorded:,} recorded"
    yield f"  charged by the last acknowledgement: {compared.orphans:,}"
    yield (
        f"  replicas' time: {format_seconds(compared.lived_us)} s lived, "
        f"{format_seconds(compared.attributed_us)} s attributed; "
        f"of {format_seconds(compared.active_us)} s active, {format_seconds(compared.used_us)} s to requests"
    )
    yield f"  sources: {compared.sources:,}; rows behind the totals: {compared.rows:,}"


def _difference_size(difference: Difference, currency: str) -> str:
    """Return the largest possible size of a difference, and which parts of it are unknown."""
    figures = (
        ("requests", difference.requests, _count_phrase(difference.requests or 0, "request")),
        ("tokens", difference.tokens, _count_phrase(difference.tokens or 0, "token")),
        ("device time", difference.device_us, f"{format_seconds(difference.device_us or 0)} s"),
        ("money", difference.amount_micros, f"{currency} {format_money(difference.amount_micros or 0)}"),
    )
    known = [amount_text for _, figure, amount_text in figures if figure]
    unknown = [name for name, figure, _ in figures if figure is None]
    parts = ["at most " + ", ".join(known)] if known else []
    return "; ".join([*parts, *(["unknown: " + ", ".join(unknown)] if unknown else [])])


def _count_phrase(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def format_money(micros: int) -> str:
    """Format micro-units of a currency with at least two decimals."""
    amount = Decimal(micros).scaleb(-6).normalize()
    places = max(2, -int(amount.as_tuple().exponent))
    return f"{amount:,.{places}f}"


def format_seconds(microseconds: int) -> str:
    """Format microseconds as seconds, to the millisecond."""
    return f"{Decimal(microseconds).scaleb(-6):,.3f}"


@contextmanager
def hint_own_key(tenant: str | None, scope: str) -> Iterator[None]:
    """Explain which key a tenant's ledger needs. Any other key gets a 404, even an operator's."""
    try:
        yield
    except CommandFailed as closed:
        if tenant is None or closed.status != HTTPStatus.NOT_FOUND:
            raise
        raise CommandFailed(
            f"the ledger of tenant '{tenant}' is shown to keys of that tenant alone, and this key is another's. "
            f"Make one with `kelvin keys create NAME --tenant {tenant} --scope {scope} --output FILE`, "
            "then use --key FILE",
            closed.status,
        ) from closed


def month_query(tenant: str | None, month: str | None) -> dict[str, str]:
    """Return the query of a tenant and a month. None means the key's own tenant, or all months."""
    return {name: value for name, value in (("tenant", tenant), ("month", month)) if value is not None}
