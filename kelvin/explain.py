"""`kelvin explain`: the arithmetic behind what Kelvin expects and does, with the figures that it has measured."""

import json
from collections.abc import Iterator
from typing import Any

import click

from kelvin.client import target


@click.group("explain")
def explain_command() -> None:
    """Show why Kelvin expects or does something, with its figures."""


@explain_command.command("start")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print the API's answer as it is.")
def start_command(model: str, as_json: bool) -> None:
    """How long a start of each version would take now, and how right that was lately."""
    with target().door() as door:
        found = door.get(f"/admin/v1/models/{model}/starts").json()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for version in found["versions"]:
        click.echo("\n".join(start_lines(found["model"], version)))


def start_lines(model: str, version: dict[str, Any]) -> list[str]:
    """One version's forecast, in words."""
    aliases = f" ({', '.join(version['aliases'])})" if version["aliases"] else ""
    lines = [f"{model}@{version['version'][:12]}{aliases}"]
    expected = version["expected"]
    if expected is None:
        lines.append("  the weight cache does not answer: nothing is known of its bytes")
    else:
        lines += _expected(expected, version["standbys"])
    past = version["past"]
    if past:
        lines.append("  said before (predicted, actual, actual / predicted):")
        lines += [
            f"    {seconds(each['predicted_s']):>9} {seconds(each['actual_s']):>9} {_ratio(each):6.2f}  {each['tier']}"
            for each in past
        ]
    return lines


def _expected(expected: dict[str, Any], standbys: int) -> Iterator[str]:
    held = [f"{tier} {_size(count)}" for tier, count in expected["bytes_by_tier"].items() if count]
    yield f"  bytes: {', '.join(held) or 'none'}"
    for tier, rate in expected["rates"].items():
        learned = f"from {rate['loads']} loads" if rate["loads"] else "a guess"
        yield f"  {tier}: {_size(rate['bytes_per_s'])}/s after {seconds(rate['fixed_s'])} ({learned})"
    steps = {"version": "its own starts", "size": "starts of about its size", "guess": "a guess"}[expected["known"]]
    parts = [
        f"max(process {seconds(expected['process_s'])}, bytes {seconds(expected['bytes_s'])})",
        f"lease {seconds(expected['lease_s'])}",
        f"bind {seconds(expected['bind_s'])}",
    ]
    whence = f"steps from {steps}, {standbys} standbys parked"
    yield f"  ready in {seconds(expected['ready_s'])} = {' + '.join(parts)}; {whence}"
    answer = seconds(expected["answer_s"])
    yield f"  first token in {seconds(expected['first_token_s'])}: known answers and prefill take {answer} more"


def _ratio(each: dict[str, Any]) -> float:
    return float(each["actual_s"]) / max(float(each["predicted_s"]), 1e-4)


def seconds(value: float) -> str:
    """In milliseconds below ten seconds."""
    return f"{value * 1000:.1f} ms" if value < 10 else f"{value:.1f} s"


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
