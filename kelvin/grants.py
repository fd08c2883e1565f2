"""`kelvin models grant`, `revoke` and `grants`: which other tenants may call a model."""

import json

import click
from rich.table import Table

from kelvin.client import json_of, target
from kelvin.tables import print_table

_OWNER = click.option("--owner", help="Whose model it is; for operators. [default: the key's own tenant]")


@click.command("grant")
@click.argument("model")
@click.argument("tenant")
@_OWNER
def grant_command(model: str, tenant: str, owner: str | None) -> None:
    """Let another tenant call a model, all its versions. It calls it OWNER/MODEL, and pays for its own requests."""
    _change("PUT", model, tenant, owner, "may call")


@click.command("revoke")
@click.argument("model")
@click.argument("tenant")
@_OWNER
def revoke_command(model: str, tenant: str, owner: str | None) -> None:
    """No longer let another tenant call a model. What is being answered is finished."""
    _change("DELETE", model, tenant, owner, "may no longer call")


@click.command("grants")
@click.option("--tenant", help="Of another tenant; for operators. [default: the key's own]")
@click.option("--json", "as_json", is_flag=True, help="Print the API's answer as it is.")
def grants_command(tenant: str | None, as_json: bool) -> None:
    """Which models others may call, and which of others' the tenant may."""
    with target().door() as door:
        found = json_of(door.get("/admin/v1/grants", params={} if tenant is None else {"tenant": tenant}))
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = Table("model", "may be called by", title="grants")
    for row in (*found["given"], *found["had"]):
        table.add_row(f"{row['owner']}/{row['model']}", row["grantee"])
    print_table(table)


def _change(method: str, model: str, tenant: str, owner: str | None, now: str) -> None:
    with target().door() as door:
        params = {} if owner is None else {"tenant": owner}
        found = json_of(door.request(method, f"/admin/v1/models/{model}/grants/{tenant}", params=params))
    late = "" if found["told"] else "; an activator has not taken it yet"
    click.echo(f"{tenant} {now} {found['owner']}/{model}{late}")
