"""Command options are generated from the settings of structs: names, bounds and descriptions."""

from typing import Annotated, Any, Literal

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec import Meta

from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.cli.base.setting_options import Setting, setting_options
from kelvin.cli.main import main
from kelvin.contracts.numbers import MAX_LIMIT
from kelvin.contracts.serving.control_messages import TenantLimits


class Things(msgspec.Struct):
    """A struct with three settings."""

    max: Annotated[Annotated[int, Meta(le=9)], Meta(ge=1, description="At most.")] = 1
    rate: Annotated[float, Meta(gt=0, description="A second.")] | None = None
    mode: Annotated[Literal["slow", "fast"], Meta(description="How.")] = "slow"


def test_settings_are_read_as_stated() -> None:
    """Options follow the fields, with type, choices, bounds (also nested) and description. Null is ignored."""
    seen: list[Setting] = []

    def kind(setting: Setting) -> click.ParamType[Any]:
        seen.append(setting)
        return click.STRING

    @click.command()
    @setting_options(Things, lambda name: f"--the-{name}", kind)
    def command(**given: str | None) -> None:
        click.echo(str({name: value for name, value in given.items() if value is not None}))

    assert seen[::-1] == [
        Setting("max", "At most.", int, low=1, high=9),
        Setting("rate", "A second.", float, above=0),
        Setting("mode", "How.", str, ("slow", "fast")),
    ]
    assert CliRunner().invoke(command, ["--the-rate", "5"]).output == "{'rate': '5'}\n"
    help_text = CliRunner().invoke(command, ["--help"]).output
    assert help_text.index("--the-max") < help_text.index("--the-rate") < help_text.index("--the-mode")
    assert "A second." in help_text


def _run(*words: str) -> Result:
    return CliRunner().invoke(main, words, terminal_width=200)


@pytest.mark.parametrize(
    ("words", "settings", "other"),
    [
        (("tenants", "set"), TenantLimits, {}),
        (("scale", "m"), ScaleSettings, {"window_s": "--window", "grace_s": "--grace", "backlog_s": "--backlog"}),
    ],
    ids=["tenants", "scale"],
)
def test_each_setting_has_its_option(words: tuple[str, ...], settings: Any, other: dict[str, str]) -> None:
    """The help shows each option with its description."""
    help_text = " ".join(_run(*words, "--help").output.split())
    for name in settings.__struct_fields__:
        assert f" {other.get(name, '--' + name.replace('_', '-'))} " in help_text
    for schema in msgspec.json.schema_components((settings,))[1][settings.__name__]["properties"].values():
        assert (schema.get("description") or schema["anyOf"][0]["description"]) in help_text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--min", "1001"), ("--max", "0"), ("--target", "0"), ("--target", "nan"), ("--window", "5"),
        ("--grace", "3601"), ("--idle", "cold"), ("--wait-price", "-1"), ("--average", "mean"), ("--backlog", "-1"),
    ],
)  # fmt: skip
def test_value_out_of_bounds_is_not_sent(option: str, value: str) -> None:
    """A value out of bounds is wrong usage."""
    done = _run("scale", "m", option, value)
    assert done.exit_code == 2
    assert option in done.output


@pytest.mark.parametrize(
    "limit",
    [
        ("--rpm", "0"), ("--rpm", "-1"), ("--body-bytes", "1023"), ("--weight", "1001"), ("--tpm", str(MAX_LIMIT + 1)),
        ("--tpm", "1.5"), ("--tpm", ""), ("--priority", "first"),
    ],
)  # fmt: skip
def test_limits_keep_their_rules(limit: tuple[str, str]) -> None:
    """Limits are checked before any request."""
    assert _run("tenants", "set", "acme", *limit).exit_code == 2


@pytest.mark.parametrize("limit", [("--tpm", MAX_LIMIT), ("--weight", 1000), ("--store-bytes", 0), ("--plan", "free")])
def test_limits_at_their_bounds_are_sent(limit: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit at its bound is sent. The help shows the bounds."""
    sent: list[Any] = []

    def call_json(method: str, path: str, *, json: Any) -> Any:
        sent.append(json)
        return {"limits": dict.fromkeys(TenantLimits.__struct_fields__)}

    monkeypatch.setattr("kelvin.cli.tenants.tenant_commands.call_json", call_json)
    option, value = limit
    assert _run("tenants", "set", "acme", option, str(value)).exit_code == 0
    assert sent == [{option[2:].replace("-", "_"): value}]
    help_text = " ".join(_run("tenants", "set", "--help").output.split())
    assert "--weight 1..1000 " in help_text
    assert f"--body-bytes 1024..{MAX_LIMIT} " in help_text


def test_limits_of_another_build_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation may have fewer or more settings than the CLI."""
    answer = {"limits": {"rpm": 5, "tpm": None, "burst": 9}}
    monkeypatch.setattr("kelvin.cli.tenants.tenant_commands.call_json", lambda *_, **__: answer)
    assert _run("tenants", "set", "acme", "--rpm", "5").output == "acme: rpm 5, tpm default, burst 9\n"
