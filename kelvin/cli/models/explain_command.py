"""`kelvin explain`: print the forecasts and costs behind Kelvin's decisions, with the measured values."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from kelvin.cli.base.api_client import call_json, current_target, decode_json_object, json_option
from kelvin.cli.base.tables import print_json
from kelvin.cli.models.model_commands import failure_lines


@click.group("explain")
def explain_command() -> None:
    """Explain what Kelvin expects and decides. Shows the measured values."""


@explain_command.command("start")
@click.argument("model")
@json_option
def start_command(model: str, as_json: bool) -> None:
    """Forecast a start of each version. Also shows how accurate recent forecasts were."""
    _print_explanation(model, "starts", as_json, lambda found, version: start_lines(found["model"], version))
    if as_json:
        return
    # The forecast does not include causes of delay, such as a full machine or a damaged chunk.
    with current_target().client() as client:
        for line in failure_lines([decode_json_object(client.get(f"/admin/v1/models/{model}"))]):
            click.echo(line)


@explain_command.command("idle")
@click.argument("model")
@json_option
def idle_command(model: str, as_json: bool) -> None:
    """Show how warm each version stays between calls. Also shows the cost of each level of warmth."""
    _print_explanation(
        model, "idle", as_json, lambda found, version: idle_lines(found["model"], found["setting"], version)
    )


def _print_explanation(model: str, what: str, as_json: bool, lines: Callable[[Any, Any], Iterable[str]]) -> None:
    """Print the API's response as JSON or as text, version by version."""
    found = call_json("GET", f"/admin/v1/models/{model}/{what}")
    if as_json:
        print_json(found)
        return
    for version in found["versions"]:
        click.echo("\n".join(lines(found, version)))


def idle_lines(model: str, setting: str, version: dict[str, Any]) -> Iterator[str]:
    """Yield one version's idle costs as text. Amounts are micro-units."""
    aliases = f" ({', '.join(version['aliases'])})" if version["aliases"] else ""
    yield f"{model}@{version['version'][:12]}{aliases}, idle={setting}"
    since = "" if version["level_s"] is None else f" for {version['level_s']:.0f} s"
    last_request = "no request yet" if version["idle_s"] is None else f"last request {version['idle_s']:.0f} s ago"
    next_step = "" if version["next_level"] is None else f"; {version['next_level']} in {version['next_in_s']:.0f} s"
    yield f"  {version['level']}{since}, {last_request}{next_step}"
    prices = version["prices"]
    yield (
        f"  prices in {prices['currency']} micro-units a second: device {prices['device_idle']:g} idle, "
        f"{prices['device_restore']:g} restoring; {prices['memory_gib']:g} a GiB of memory; {prices['wait']:g} a caller"
    )
    sizes = (f"{level} {_short_size(prices[f'{level}_bytes'])}" for level in ("warm", "asleep", "asleep2"))
    yield f"  memory: {', '.join(sizes)}"
    for level in version["levels"]:
        sample_note = "" if not level["wake_s"] else f" ({level['seen']} seen)" if level["seen"] else " (a guess)"
        best = "never the cheapest" if level["from_s"] is None else f"the cheapest from {level['from_s']:.1f} s on"
        wake = f"wakes in {format_duration(level['wake_s'])}{sample_note} for {level['wake']:.0f}"
        yield f"  {level['level']:>7}: {level['hold']:.3f} a second, {wake}; {best}"
    if version["fetches"]:
        found = (
            f"{each['tier']} {format_duration(each['seconds'])} ({each['seen']} seen)" for each in version["fetches"]
        )
        yield f"  time to fetch weights, for zero and asleep2: {', '.join(found)}"
    pauses = version["pauses"]
    if pauses["count"]:
        lengths = ", ".join(f"up to {bound} s: {count}" for bound, count in pauses["by_length"].items())
        yield f"  {pauses['count']} pauses, {pauses['mean_s']:.1f} s in the mean ({lengths})"
        always = ", ".join(f"always {level} {amount:.0f}" for level, amount in pauses["throughout"].items())
        yield (
            f"  they cost {pauses['by_break_even']:.0f} by break-even; {always}; "
            f"with foresight {pauses['with_foresight']:.0f}"
        )
    if setting != "auto":
        yield "  break-even is shown but not applied: `kelvin scale MODEL --idle auto` applies it"


def start_lines(model: str, version: dict[str, Any]) -> list[str]:
    """Return one version's start forecast as text."""
    aliases = f" ({', '.join(version['aliases'])})" if version["aliases"] else ""
    lines = [f"{model}@{version['version'][:12]}{aliases}"]
    expected = version["expected"]
    if expected is None:
        why = "the weight cache does not answer, or the manifest is damaged or missing (kelvin fsck)"
        lines.append(f"  no forecast: {why}")
    else:
        lines += _expected_start(expected, version["standbys"])
    if version["wake_s"] is not None:
        lines.append(f"  it sleeps, and is ready {format_duration(version['wake_s'])} after a request")
    past = version["past"]
    if past:
        lines.append("  recent starts (predicted, actual, actual / predicted):")
        lines += [
            f"    {format_duration(each['predicted_s']):>9} {format_duration(each['actual_s']):>9} "
            f"{_ratio(each):6.2f}  {each['tier']}"
            for each in past
        ]
    return lines


def _expected_start(expected: dict[str, Any], standbys: int) -> Iterator[str]:
    sizes = [f"{tier} {_short_size(count)}" for tier, count in expected["bytes_by_tier"].items() if count]
    yield f"  bytes: {', '.join(sizes) or 'none'}"
    for tier, rate in expected["rates"].items():
        learned = f"from {rate['loads']} loads" if rate["loads"] else "a guess"
        yield f"  {tier}: {_short_size(rate['bytes_per_s'])}/s after {format_duration(rate['fixed_s'])} ({learned})"
    steps = {"version": "its own starts", "size": "starts of about its size", "guess": "a guess"}[expected["known"]]
    parts = [
        f"max(process {format_duration(expected['process_s'])}, bytes {format_duration(expected['bytes_s'])})",
        f"lease {format_duration(expected['lease_s'])}",
        f"bind {format_duration(expected['bind_s'])}",
    ]
    whence = f"steps from {steps}, {standbys} standbys parked"
    yield f"  ready in {format_duration(expected['ready_s'])} = {' + '.join(parts)}; {whence}"
    answer = format_duration(expected["answer_s"])
    yield f"  first token in {format_duration(expected['first_token_s'])}: known answers and prefill take {answer} more"


def _ratio(each: dict[str, Any]) -> float:
    return float(each["actual_s"]) / max(float(each["predicted_s"]), 1e-4)


def format_duration(value: float) -> str:
    """Return seconds as text, in milliseconds below ten seconds."""
    return f"{value * 1000:.1f} ms" if value < 10 else f"{value:.1f} s"


def _short_size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
