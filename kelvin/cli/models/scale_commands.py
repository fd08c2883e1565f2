"""`kelvin scale`: set how a model scales, and replay the autoscaler's decisions on recorded observations."""

from collections.abc import Callable
from typing import Any, BinaryIO, Final

import click

from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.cli.base.api_client import call_json, json_option
from kelvin.cli.base.setting_options import Setting, setting_options
from kelvin.cli.base.tables import print_json
from kelvin.cli.models.scale_replay_policy import BadCase, average, replay_cases
from kelvin.contracts.wire import encode
from kelvin.process.option_types import FiniteNumber

_SETTINGS: Final = "MODEL"  # can't be a model's name: those are lower-case


class _ScaleGroup(click.Group):
    """A click group in which arguments that name no command are a model and its settings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the hidden command's name before a model, then parse as click does."""
        if args and args[0] not in (*self.commands, "--help"):
            args = [_SETTINGS, *args]
        return super().parse_args(ctx, args)


def _option_type(setting: Setting) -> click.ParamType[Any]:
    if setting.choices:
        return click.Choice(setting.choices)
    if setting.kind is int:
        return click.IntRange(setting.low, setting.high)
    low = setting.low if setting.above is None else setting.above
    return FiniteNumber(low, setting.high, min_open=setting.above is not None)


@click.group("scale", cls=_ScaleGroup, subcommand_metavar="MODEL [OPTIONS] | replay FILE | windows FILE")
def scale_command() -> None:
    """Set how a model scales: `kelvin scale MODEL --help`. `replay` and `windows` run the autoscaler's code on a file.
    To set a model that has one of these names, put the word MODEL before it: `kelvin scale MODEL replay --max 4`.
    """


@scale_command.command(_SETTINGS)
@click.argument("model")
@setting_options(ScaleSettings, lambda name: f"--{name.removesuffix('_s').replace('_', '-')}", _option_type)
@json_option
def settings_command(model: str, as_json: bool, **given: float | str | None) -> None:
    """Set how a model scales and print the settings. Settings that are not given stay."""
    body = {name: value for name, value in given.items() if value is not None}
    answer = call_json("PUT", f"/admin/v1/models/{model}/scale", json=body)
    if as_json:
        print_json(answer)
    else:
        click.echo(" ".join(f"{name}={value}" for name, value in answer.items()))


@scale_command.command("replay")
@click.argument("file", type=click.File("rb"))
def replay_command(file: BinaryIO) -> None:
    """Print the autoscaler's decision for each step of the cases in FILE, as JSON. `-` is standard input."""
    _print_replay(replay_cases, file)


@scale_command.command("windows")
@click.argument("file", type=click.File("rb"))
def windows_command(file: BinaryIO) -> None:
    """Print the averages of the windows in FILE, as JSON. `-` is standard input."""
    _print_replay(average, file)


# These commands compute locally and call no installation.
LOCAL: Final = frozenset({replay_command, windows_command})


def _print_replay(run: Callable[[bytes], object], file: BinaryIO) -> None:
    try:
        click.echo(encode(run(file.read())))
    except BadCase as bad:
        raise click.ClickException(str(bad)) from bad
