"""Define the command `kelvin`. Top-level commands are mounted here, a group's commands in the group's module."""

import dataclasses
import errno
import importlib.metadata
import io
import os
import sys
from pathlib import Path
from typing import Any, Final

import click
import httpx

from kelvin.cli.artifacts.export_command import export_command
from kelvin.cli.artifacts.push_command import push_command
from kelvin.cli.artifacts.store_commands import collect_command, fsck_command
from kelvin.cli.base.api_client import CommandFailed, Target, unreachable_error
from kelvin.cli.models.explain_command import explain_command
from kelvin.cli.models.model_commands import deploy_command, models_command, status_command, stop_command
from kelvin.cli.models.scale_commands import LOCAL, scale_command
from kelvin.cli.models.version_commands import show_command, versions_command
from kelvin.cli.operations.bench_commands import bench_command, drill_command
from kelvin.cli.operations.doctor_command import doctor_command
from kelvin.cli.operations.installation_commands import logs_command, restart_command, up_command
from kelvin.cli.operations.pod_commands import cache_command, engine_command, runtime_command
from kelvin.cli.operations.recovery_commands import backup_command, restore_command
from kelvin.cli.operations.render_commands import cluster_group
from kelvin.cli.operations.timeline_command import timeline_command
from kelvin.cli.tenants.audit_commands import audit_command
from kelvin.cli.tenants.billing_commands import billing_command
from kelvin.cli.tenants.key_commands import keys_command
from kelvin.cli.tenants.tenant_commands import tenants_command
from kelvin.contracts.errors import Refused
from kelvin.contracts.setting_parser import BadSetting
from kelvin.supervisor.settings import CA, KEY, URL, default_data

_NO_SPACE_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _Kelvin(click.Group):
    """A click group that turns refusals from any command into one sentence and exit code 1."""

    def invoke(self, ctx: click.Context) -> object:
        _buffer_output()
        try:
            return super().invoke(ctx)
        except Refused as refused:
            raise CommandFailed(refused.failure.message) from refused
        except httpx.TransportError as error:
            raise unreachable_error(error) from error
        except OSError as error:
            if error.filename is None and error.errno in _NO_SPACE_ERRNOS:  # raised by a write
                raise CommandFailed(f"a file can't be written: {error.strerror}") from error
            if error.filename is None:
                raise  # the error concerns no file that the user named
            raise CommandFailed(f"{os.fsdecode(error.filename)}: {error.strerror}") from error
        except BadSetting as bad:
            raise click.UsageError(str(bad)) from bad


def _buffer_output() -> None:
    """Make standard output line-buffered under PYTHONUNBUFFERED. Python's unbuffered stream ignores a short write. On a
    full disk a bill would be truncated with exit code 0.
    """
    out = sys.stdout
    if isinstance(getattr(out, "buffer", None), io.RawIOBase):
        sys.stdout = open(  # noqa: SIM115 - it stays open until the process ends
            out.fileno(), "w", buffering=1, encoding=out.encoding, errors=out.errors, closefd=False
        )


@click.group(cls=_Kelvin)
@click.version_option(importlib.metadata.version("kelvin-serving"), prog_name="kelvin")
@click.pass_context
def main(context: click.Context) -> None:
    """Run models that scale to zero and start fast.

    \b
    Start an installation:        kelvin up Upload a directory:           kelvin push DIR --name MODEL See what runs:
    kelvin status
    """
    context.obj = Target(default_data())


def _set_target(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Point the running command at another installation. Each option has the name of a field of `Target`."""
    if value is not None:
        assert isinstance(context.obj, Target)
        context.obj = dataclasses.replace(context.obj, **{str(parameter.name): value})


class _NamedPath(click.Path):
    """A path type that refuses the empty string. A shell makes an empty string of `--data "$MISSING"`, and `Path("")`
    would be the current directory.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("must not be empty", param, ctx)
        return super().convert(value, param, ctx)


def _target_option(name: str, variable: str, kind: Any, what: str) -> click.Option:
    text = f"{what} [default: ${variable}, else from the data directory]"
    return click.Option([name], type=kind, envvar=variable, callback=_set_target, expose_value=False, help=text)


_DATA_HELP = "Data directory. [default: $KELVIN_DATA, else kelvin/ in $XDG_DATA_HOME or ~/.local/share]"
_LOCAL_ONLY = (up_command, backup_command, doctor_command, logs_command, restart_command, restore_command)


def _add_target_options(command: click.Command) -> click.Command:
    """Add the options that choose the installation to a command, or to every command of a group."""
    if isinstance(command, click.Group):
        for child in command.commands.values():
            if child not in LOCAL:
                _add_target_options(child)
        if not command.invoke_without_command:
            return command
    file, directory = _NamedPath(path_type=Path, dir_okay=False), _NamedPath(path_type=Path, file_okay=False)
    command.params += [
        click.Option(["--data"], type=directory, callback=_set_target, expose_value=False, help=_DATA_HELP),
    ]
    if command not in _LOCAL_ONLY:
        command.params += [
            _target_option("--url", URL, str, "URL of the installation, such as https://HOST:8443."),
            _target_option("--ca", CA, file, "File with the installation's CA certificate (PEM)."),
            _target_option("--key", KEY, file, "File with an API key."),
        ]
    return command


# These commands call no installation and get no target options. Benches and drills start their own installations.
main.add_command(bench_command)
main.add_command(drill_command)
main.add_command(runtime_command)
main.add_command(cache_command)
main.add_command(engine_command)
main.add_command(cluster_group)
for _command in (
    audit_command,
    backup_command,
    billing_command,
    collect_command,
    deploy_command,
    doctor_command,
    explain_command,
    export_command,
    fsck_command,
    keys_command,
    logs_command,
    models_command,
    push_command,
    restart_command,
    restore_command,
    scale_command,
    show_command,
    status_command,
    stop_command,
    tenants_command,
    timeline_command,
    up_command,
    versions_command,
):
    main.add_command(_add_target_options(_command))


if __name__ == "__main__":
    main()
