"""`kelvin audit`: list who changed what, verify that no entry is missing, and set how long entries are kept."""

import json
from collections.abc import Mapping
from typing import Any, Final

import click
from rich.table import Table

from kelvin.cli.base.api_client import call_json, current_target, json_option, poll_report, tenant_query
from kelvin.cli.base.tables import format_instant, print_json, print_table
from kelvin.contracts.accounting.audit_reports import AuditReport, AuditWindows, Expired
from kelvin.contracts.numbers import parse_whole_number
from kelvin.contracts.wire import decode

UNSOUND_EXIT: Final = 2
_PEER: Final = "answer of the control plane"
_TENANT_OPTION = click.option(
    "--tenant", help="Another tenant; for operators. '' is the installation. [default: the key's own]"
)
_ALL_OPTION = click.option("--all", "every", is_flag=True, help="All tenants and the installation; for operators.")


@click.group("audit")
def audit_command() -> None:
    """Show and verify who changed what, and when."""


@audit_command.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="How many, latest first.")
@_TENANT_OPTION
@json_option
def list_command(limit: int, tenant: str | None, as_json: bool) -> None:
    """List who created, changed and deleted what, and when."""
    found = call_json("GET", "/admin/v1/audit", params={**tenant_query(tenant), "limit": str(limit)})
    if as_json:
        print_json(found)
        return
    table = Table("link", "at", "by", "what", "which", "", title="audit, UTC")
    for row in found["events"]:
        detail = f"(expired: {row['window']})" if row["expired"] else row["detail"] or format_changes(row["changed"])
        table.add_row(
            str(row["link"]), format_instant(row["at_s"]), row["actor"], row["action"], row["subject"], detail
        )
    print_table(table)


@audit_command.command("verify")
@_TENANT_OPTION
@_ALL_OPTION
def verify_command(tenant: str | None, every: bool) -> None:
    """Recompute the chain from its entries.

    Exits with 2 if an entry was changed, removed, added, moved, or expired too early, and names the first one. Note the
    digest elsewhere: the database's owner can forge another chain, but not one that ends in the same digest.
    """
    with current_target().client() as client:
        raw = poll_report(client, "/admin/v1/audit/verify", {"all": "true"} if every else tenant_query(tenant))
    report = decode(raw, AuditReport, field=_PEER)
    for chain in report.chains:
        name = _name(chain.tenant)
        click.echo(f"{name}: {chain.links:,} entries hold, {chain.expired:,} of them expired, chain {chain.chain}")
        if chain.difference is not None:
            click.echo(f"{name}: {chain.difference}", err=True)
    if not report.sound:
        click.get_current_context().exit(UNSOUND_EXIT)


@audit_command.command("expire")
@click.option("--tenant", help="Only this tenant; '' is the installation. [default: all]")
def expire_command(tenant: str | None) -> None:
    """Expire entries older than their window now; for operators. The installation does this every hour. An expired
    entry loses its text and keeps its digest, so the chain still verifies.
    """
    with current_target().client() as client:
        answer = client.post("/admin/v1/audit/expire", params=tenant_query(tenant))
    found = decode(answer.content, Expired, field=_PEER).entries
    for name, count in sorted(found.items()):
        click.echo(f"{_name(name)}: {count:,} entries expired")
    if not found:
        click.echo("nothing is older than its window")


@audit_command.command("windows")
@click.option("--set", "wanted", metavar="WINDOW=DAYS", multiple=True, help="Days to keep, or `default`; repeat.")
@_TENANT_OPTION
def windows_command(wanted: tuple[str, ...], tenant: str | None) -> None:
    """Print or set how many days entries are kept. Example: `kelvin audit windows --set keys=400`. `--set` is for
    operators. With `--tenant ''` it applies to every tenant without windows of its own.
    """
    days_of, where = _parse_days(wanted), tenant_query(tenant)
    with current_target().client() as client:
        if days_of:
            answer = client.put("/admin/v1/audit/windows", params=where, json={"days": days_of})
        else:
            answer = client.get("/admin/v1/audit/windows", params=where)
    for name, days in decode(answer.content, AuditWindows, field=_PEER).days.items():
        click.echo(f"{name}: {days} days")


def format_changes(fields: Mapping[str, Any]) -> str:
    """Return changed fields as one line, such as `rpm none → 60`."""
    return ", ".join(f"{name} {_value(was)} → {_value(now)}" for name, (was, now) in fields.items())


def _value(value: object) -> str:
    match value:
        case None:
            return "none"
        case str():
            return value if len(value) < 64 else f"{value[:12]}…"  # a digest
        case _:
            return json.dumps(value)


def _parse_days(assignments: tuple[str, ...]) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for each in assignments:
        name, _, days = each.partition("=")
        number = parse_whole_number(days)
        if (number is None and days != "default") or name in found:
            raise click.UsageError(f"--set {each}: must be WINDOW=DAYS or WINDOW=default, each window once")
        found[name] = number
    return found


def _name(tenant: str) -> str:
    return tenant or "(the installation)"
