"""`kelvin billing reconcile`: every difference between two accounts, with what it is worth at most."""

import sys
from collections.abc import Iterator
from typing import Final

import click

from contracts.billing import Compared, Difference, ReconcileReport
from contracts.wire import decode
from kelvin.examined import examined, hint_own_key, of_month
from kelvin.money import money, seconds

DIFFERENT_EXIT: Final = 2


@click.command("reconcile")
@click.option("--tenant", help="Whose ledger; it needs a key of that tenant. [default: the key's own]")
@click.option("--month", metavar="YYYY-MM", help="Calendar month, UTC. [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def reconcile_command(context: click.Context, tenant: str | None, month: str | None, as_json: bool) -> None:
    """Hold requests, lives, sources and totals against each other, and name each difference and its size.

    Exits with code 2 where two accounts differ that must agree. Differences that are known (charged by the last
    acknowledgement, on their way) are named, and are no failure.
    """
    with context.obj.door() as door, hint_own_key(tenant, "billing:read"):
        raw = examined(door, "/admin/v1/billing/reconcile", of_month(tenant, month))
    report = decode(raw, ReconcileReport, what="answer of the control plane")
    if as_json:
        click.echo(raw.decode())
    else:
        for line in lines(report):
            click.echo(line)
    if not report.agrees:
        sys.exit(DIFFERENT_EXIT)


def lines(report: ReconcileReport) -> Iterator[str]:
    """For people: what was compared, each difference, the verdict."""
    compared = report.compared
    yield f"{report.tenant}, {', '.join(report.months) or 'no month'}:"
    yield from _compared(compared)
    for difference in report.differences:
        yield f"{'' if difference.fails else 'known: '}{difference.kind}: {difference.subject}: {difference.detail}"
        size = _size(difference, report.currency)
        yield f"  {'; '.join(part for part in (size, difference.cause) if part)}"
        if difference.ids and difference.ids != (difference.subject,):
            yield f"  requests: {', '.join(difference.ids)}"
    if report.more:
        yield f"and {report.more:,} more differences"
    yield f"the accounts {'agree' if report.agrees else 'DIFFER'}"


def _compared(compared: Compared) -> Iterator[str]:
    yield f"  requests: {compared.served:,} by {compared.replicas:,} replicas, {compared.recorded:,} recorded"
    yield f"  charged by the last acknowledgement: {compared.orphans:,}"
    yield (
        f"  replicas' time: {seconds(compared.lived_us)} s lived, {seconds(compared.attributed_us)} s attributed; "
        f"of {seconds(compared.active_us)} s active, {seconds(compared.used_us)} s to requests"
    )
    yield f"  sources: {compared.sources:,}; rows behind the totals: {compared.rows:,}"


def _size(difference: Difference, currency: str) -> str:
    """At most so much; what nobody knows is said."""
    figures = (
        ("requests", difference.requests, _counted(difference.requests or 0, "request")),
        ("tokens", difference.tokens, _counted(difference.tokens or 0, "token")),
        ("device time", difference.device_us, f"{seconds(difference.device_us or 0)} s"),
        ("money", difference.amount_micros, f"{currency} {money(difference.amount_micros or 0)}"),
    )
    known = [told for _, figure, told in figures if figure]
    unknown = [name for name, figure, _ in figures if figure is None]
    parts = ["at most " + ", ".join(known)] if known else []
    return "; ".join([*parts, *(["unknown: " + ", ".join(unknown)] if unknown else [])])


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"
