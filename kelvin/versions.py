"""`kelvin versions`: what a model has, and no longer serving one of them."""

import json
import time
from typing import Any

import click
from rich.table import Table

from contracts.names import parse_reference
from kelvin.client import json_of, target
from kelvin.models import behind_lines
from kelvin.tables import print_table


@click.group("versions")
def versions_command() -> None:
    """List and delete versions of a model."""


@versions_command.command("list")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print the API's answer as it is.")
def list_command(model: str, as_json: bool) -> None:
    """Versions of MODEL, the oldest first; deleted ones too."""
    with target().door() as door:
        found = json_of(door.get(f"/admin/v1/models/{model}"))
    if as_json:
        click.echo(json.dumps(found["versions"], indent=2))
        return
    print_table(_table(model, found["versions"]))
    for line in behind_lines([{"model": model, "versions": found["versions"]}]):
        click.echo(line)


@versions_command.command("delete")
@click.argument("reference", metavar="M@VERSION")
def delete_command(reference: str) -> None:
    """No longer serve a version (12 or more hex digits) that no alias names and no replica runs.

    Its bytes stay until `kelvin collect --run` has found it so for the grace period; the same push brings it back.
    """
    found = parse_reference(reference)
    if found.version_prefix is None:
        raise click.UsageError(f"{reference}: must be MODEL@VERSION with 12 or more hex digits of the version")
    with target().door() as door:
        answer = json_of(door.delete(f"/admin/v1/models/{found.model}/versions/{found.version_prefix}"))
    click.echo(
        f"deleted {found.model}@{answer['version']}; `kelvin collect --run` frees its bytes after the grace period"
    )


def _table(model: str, versions: list[dict[str, Any]]) -> Table:
    columns = ("version", "aliases", "health", "state", "architecture", "MB", "pushed")
    table = Table(*columns, title=f"versions of {model}, UTC")
    for row in versions:
        pushed = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["created_at_s"]))
        size = f"{row['total_bytes'] / 1e6:.1f}"
        aliases = ", ".join(row["aliases"])
        table.add_row(row["version"][:12], aliases, row["health"], row["state"], row["architecture"], size, pushed)
    return table
