"""`kelvin collect`: free what no version of the tenant needs, or say what that would be."""

import json
from datetime import timedelta
from typing import Final

import click
import msgspec

from contracts.errors import Refused
from contracts.names import dns_label
from contracts.push import CollectReport, CollectRequest
from contracts.wire import decode, encode
from kelvin.client import failure_of
from kelvin.push_calls import Door, open_door

COLLECT_S: Final = 600.0


def collect(door: Door, run: bool, tenant: str | None = None) -> CollectReport:
    """Of the key's tenant, or for an operator another one. Raises `Refused`."""
    path = "/push/v1/collect" if tenant is None else f"/push/v1/collect?tenant={tenant}"
    body, headers = encode(CollectRequest(run=run)), {"content-type": "application/json"}
    answer = door.request("POST", path, content=body, headers=headers, timeout=COLLECT_S)
    if not answer.is_success:
        raise Refused(failure_of(answer))
    return decode(answer.content, CollectReport, what="the installation's answer")


@click.command("collect")
@click.option("--run/--dry-run", "run", required=True, help="Free it, or only say what would be freed.")
@click.option("--tenant", help="Another tenant, also one that was deleted; for operators.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def collect_command(run: bool, tenant: str | None, as_json: bool) -> None:
    """Free objects that no version needs, once nothing has needed them for the grace period.

    A version that no model names is marked by the first run, and freed by one after the grace period.
    """
    with open_door() as door:
        report = collect(door, run, None if tenant is None else dns_label(tenant, "tenant"))
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(report)))
        return
    for freed in report.freed:
        click.echo(f"{'freed' if run else 'would free'} {freed.key} ({freed.nbytes} bytes): {freed.reason}")
    for condemned in report.condemned:
        left = timedelta(seconds=condemned.kept_s)
        click.echo(f"no model names version {condemned.version}: kept for {left} more")
    click.echo(_sentence(report))


def _sentence(report: CollectReport) -> str:
    nbytes = sum(freed.nbytes for freed in report.freed)
    did = "freed" if report.ran else "would free"
    kept = f"{report.versions} versions and {report.packs} packs are kept"
    held = f", in which {report.unreferenced_bytes} bytes belong to no version" if report.unreferenced_bytes else ""
    dropped = f"; dropped {report.dropped_pushes} pushes that stood still" if report.dropped_pushes else ""
    running = "; a push was running: what it needs is kept" if report.pushes_running else ""
    lost = f"; {report.lost} chunks are in no pack, so no pack is freed: run `kelvin fsck`" if report.lost else ""
    return f"{did} {len(report.freed)} objects, {nbytes} bytes; {kept}{held}{dropped}{running}{lost}"
