"""`kelvin keys`: create, rotate and revoke API keys. A secret is printed once, or written to a file."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table

from kelvin.cli.base.api_client import (
    CommandFailed,
    call_json,
    current_target,
    decode_json_object,
    json_option,
    tenant_query,
)
from kelvin.cli.base.rate_policy import parse_duration_s
from kelvin.cli.base.tables import format_instant, print_json, print_table
from kelvin.contracts.serving.control_messages import Scope
from kelvin.process.atomic_file import pending_file

_ROOM_BYTES: Final = 4096  # more than the length of a key


class Duration(click.ParamType[int]):
    """A click type for durations such as `24h`. The value is whole seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_duration_s(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


_TENANT_OPTION = click.option("--tenant", help="Another tenant; for operators. [default: the key's own]")
_SCOPES = click.Choice([scope.value for scope in Scope])
_OUTPUT_OPTION = click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the secret to this file, mode 0600."
)


@click.group("keys")
def keys_command() -> None:
    """Manage a tenant's API keys. A secret is shown once and never stored."""


@keys_command.command("list")
@_TENANT_OPTION
@json_option
def list_command(tenant: str | None, as_json: bool) -> None:
    """List valid and ended keys, without their secrets."""
    found = call_json("GET", "/admin/v1/keys", params=tenant_query(tenant))
    if as_json:
        print_json(found)
        return
    table = Table("id", "name", "state", "scopes", "models", "created", "expires", "last used", title="keys, UTC")
    for row in found["keys"]:
        table.add_row(
            row["key_id"],
            row["name"],
            row["state"],
            " ".join(row["scopes"]),
            " ".join(row["models"]) or "all",
            format_instant(row["created_at_s"]),
            format_instant(row["expires_at_s"], "never"),
            format_instant(row["last_used_at_s"], "never"),
        )
    print_table(table)


@keys_command.command("create")
@click.argument("name")
@click.option("--scope", "scopes", type=_SCOPES, multiple=True, required=True, help="Allowed operations; repeat.")
@click.option("--model", "models", multiple=True, help="Allow only this model; repeat. [default: all]")
@click.option("--expires", type=Duration(), help="Lifetime, such as 90d. [default: until it is revoked]")
@_TENANT_OPTION
@_OUTPUT_OPTION
@json_option
def create_command(
    name: str,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    expires: int | None,
    tenant: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Create an API key. Example: `kelvin keys create ci --scope infer --output ci.key`. Its secret is printed alone on
    standard output, or written to --output. It can't be shown again.
    """
    body = {"name": name, "scopes": scopes, "models": models, "expires_in_s": expires}
    _create_key("/admin/v1/keys", body, tenant, output, as_json, replace=False)


@keys_command.command("rotate")
@click.argument("key_id", metavar="ID")
@click.option("--overlap", type=Duration(), default="24h", show_default=True, help="How long the old key stays valid.")
@_TENANT_OPTION
@_OUTPUT_OPTION
@json_option
def rotate_command(key_id: str, overlap: int, tenant: str | None, output: Path | None, as_json: bool) -> None:
    """Replace a key. The new key has the rights of ID; ID ends after the overlap. Overwrites the file of --output."""
    _create_key(f"/admin/v1/keys/{key_id}/rotate", {"overlap_s": overlap}, tenant, output, as_json, replace=True)


@keys_command.command("revoke")
@click.argument("key_id", metavar="ID")
@_TENANT_OPTION
def revoke_command(key_id: str, tenant: str | None) -> None:
    """End a key now. Running requests are finished."""
    found = call_json("POST", f"/admin/v1/keys/{key_id}/revoke", params=tenant_query(tenant))
    late = "" if found["told"] else "; an activator has not taken it yet"
    click.echo(f"{key_id}: revoked{late}")


def _create_key(
    path: str, body: dict[str, Any], tenant: str | None, output: Path | None, as_json: bool, *, replace: bool
) -> None:
    """Create a key and write its secret to `output`, or else to standard output."""
    with contextlib.ExitStack() as stack:
        write = None if output is None else stack.enter_context(key_file(output, replace=replace))
        client = stack.enter_context(current_target().client())
        made = decode_json_object(client.post(path, json=body, params=tenant_query(tenant)))
        if write is not None:
            write(made.pop("secret"))
    if as_json:
        print_json(made)
        return
    key, old = made["key"], made["old"]
    click.echo(f"{key['key_id']}: {key['name']}, {' '.join(key['scopes'])}", err=True)
    if old is not None:
        click.echo(f"{old['key_id']}: good until {format_instant(old['expires_at_s'])} UTC", err=True)
    if output is None:
        click.echo(made["secret"])


@contextlib.contextmanager
def key_file(path: Path, *, replace: bool) -> Iterator[Callable[[str], None]]:
    """Prepare a file for a key before the key exists. Raises CommandFailed if the file can't be made.

    Yields a function that writes the key: whole or not at all, mode 0600. That function raises CommandFailed if the
    file was made meanwhile and `replace` is False.
    """
    if os.path.lexists(path) and not replace:  # also true for a dangling link
        raise CommandFailed(f"{path} exists; a new key does not replace it")
    with contextlib.ExitStack() as stack:
        try:
            draft = stack.enter_context(pending_file(path, 0o600))
            os.posix_fallocate(draft.file.fileno(), 0, _ROOM_BYTES)  # a full disk may accept a file but no bytes
        except OSError as error:
            raise CommandFailed(f"{path} can't be written: {error.strerror}") from error

        def write(secret: str) -> None:
            draft.file.write(secret.encode() + b"\n")
            draft.file.truncate()
            try:
                draft.commit(replace=replace)
            except FileExistsError as error:
                advice = "its file is kept, and the new key has none: revoke it (`kelvin keys list`), and make another"
                raise CommandFailed(f"{path} was made meanwhile; {advice}") from error

        yield write
