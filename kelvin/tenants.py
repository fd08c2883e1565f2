"""`kelvin tenants`: whose models there are. All but `list` need the key of an operator."""

import json

import click
from rich.console import Console
from rich.table import Table

from kelvin.client import target
from kelvin.instants import instant


@click.group("tenants")
def tenants_command() -> None:
    """Tenants of the installation."""


@tenants_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the API's answer as it is.")
def list_command(as_json: bool) -> None:
    """Every tenant, or the key's own where it is no operator's."""
    with target().door() as door:
        found = door.get("/admin/v1/tenants").json()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = Table("tenant", "state", "models", "keys", "created", title="tenants")
    for row in found["tenants"]:
        table.add_row(row["tenant"], row["state"], str(row["models"]), str(row["keys"]), instant(row["created_at_s"]))
    Console().print(table)


@tenants_command.command("create")
@click.argument("tenant")
def create_command(tenant: str) -> None:
    """Make a tenant; its name is a DNS label. It has no key yet: `kelvin keys create NAME --tenant TENANT`."""
    with target().door() as door:
        door.post("/admin/v1/tenants", json={"tenant": tenant})
    click.echo(f"{tenant}: created")


@tenants_command.command("suspend")
@click.argument("tenant")
def suspend_command(tenant: str) -> None:
    """Refuse all of its keys and take its models to zero. What is being answered is finished."""
    with target().door() as door:
        door.post(f"/admin/v1/tenants/{tenant}/suspend")
    click.echo(f"{tenant}: suspended")


@tenants_command.command("resume")
@click.argument("tenant")
def resume_command(tenant: str) -> None:
    """Let a suspended tenant go on."""
    with target().door() as door:
        door.post(f"/admin/v1/tenants/{tenant}/resume")
    click.echo(f"{tenant}: active")


@tenants_command.command("delete")
@click.argument("tenant")
def delete_command(tenant: str) -> None:
    """Delete a tenant that has no model and no good key; its name is not given again."""
    with target().door() as door:
        door.delete(f"/admin/v1/tenants/{tenant}")
    click.echo(f"{tenant}: deleted")
