"""`kelvin tenants`: list, create, suspend, limit and delete tenants. All but `list` need an operator's key."""

from typing import Any, Final

import click
from rich.table import Table

from kelvin.cli.base.api_client import call_json, current_target, json_option
from kelvin.cli.base.setting_options import Setting, setting_options
from kelvin.cli.base.tables import format_instant, print_json, print_table
from kelvin.contracts.numbers import parse_whole_number
from kelvin.contracts.serving.control_messages import TenantLimits

DEFAULT: Final = "default"


class _LimitType(click.ParamType[int | str]):
    """A click type for a whole number from `low` to `high`, or `default`."""

    def __init__(self, low: int, high: int) -> None:
        self.name = f"{low}..{high}"  # shown in help
        self._low, self._high = low, high

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value)
        if text == DEFAULT:
            return text
        number = parse_whole_number(text, len(str(self._high)))
        if number is None or not self._low <= number <= self._high:
            rule = f"must be '{DEFAULT}' or a whole number from {self._low} to {self._high}"
            self.fail(f"{text[:40]!r}: {rule}", param, ctx)
        return number


def _limit_type(setting: Setting) -> click.ParamType[Any]:
    if setting.choices:
        return click.Choice([*setting.choices, DEFAULT])
    if setting.kind is not int:
        return click.STRING
    assert setting.low is not None
    assert setting.high is not None
    return _LimitType(setting.low, setting.high)


@click.group("tenants")
def tenants_command() -> None:
    """Manage the tenants of the installation."""


@tenants_command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List all tenants. Without an operator's key, list only the key's own tenant."""
    found = call_json("GET", "/admin/v1/tenants")
    if as_json:
        print_json(found)
        return
    table = Table("tenant", "state", "models", "keys", "created", "own limits", title="tenants")
    for row in found["tenants"]:
        limits = "\n".join(f"{name} {value}" for name, value in row["limits"].items() if value is not None)
        counts = (str(row["models"]), str(row["keys"]))
        table.add_row(row["tenant"], row["state"], *counts, format_instant(row["created_at_s"]), limits)
    print_table(table)


@tenants_command.command("create")
@click.argument("tenant")
def create_command(tenant: str) -> None:
    """Create a tenant. Its name is a DNS label. It has no key yet: `kelvin keys create NAME --tenant TENANT --scope
    admin`.
    """
    with current_target().client() as client:
        client.post("/admin/v1/tenants", json={"tenant": tenant})
    click.echo(f"{tenant}: created")


@tenants_command.command("suspend")
@click.argument("tenant")
def suspend_command(tenant: str) -> None:
    """Refuse all keys of a tenant and scale its models to zero. Running requests are finished."""
    with current_target().client() as client:
        client.post(f"/admin/v1/tenants/{tenant}/suspend")
    click.echo(f"{tenant}: suspended")


@tenants_command.command("resume")
@click.argument("tenant")
def resume_command(tenant: str) -> None:
    """Reactivate a suspended tenant."""
    with current_target().client() as client:
        client.post(f"/admin/v1/tenants/{tenant}/resume")
    click.echo(f"{tenant}: active")


@tenants_command.command("set")
@click.argument("tenant")
@setting_options(TenantLimits, lambda name: f"--{name.replace('_', '-')}", _limit_type)
def set_command(tenant: str, **given: int | str | None) -> None:
    """Set a tenant's limits: `kelvin tenants set acme --rpm 600`. `default` restores the installation's setting."""
    body = {name: None if value == DEFAULT else value for name, value in given.items() if value is not None}
    limits = call_json("PUT", f"/admin/v1/tenants/{tenant}/limits", json=body)["limits"]
    shown = (f"{name} {DEFAULT if value is None else value}" for name, value in limits.items())
    click.echo(f"{tenant}: {', '.join(shown)}")


@tenants_command.command("delete")
@click.argument("tenant")
@click.option("--force", is_flag=True, help="Delete its models and keys as well, now.")
def delete_command(tenant: str, force: bool) -> None:
    """Delete a tenant without models and valid keys. Its name can't be used again, and its usage stays in the ledger.
    `kelvin collect --run --tenant TENANT` frees its bytes in the store.
    """
    with current_target().client() as client:
        client.delete(f"/admin/v1/tenants/{tenant}", params={"force": "true"} if force else {})
    click.echo(f"{tenant}: deleted; `kelvin collect --run --tenant {tenant}` frees its bytes after the grace period")
