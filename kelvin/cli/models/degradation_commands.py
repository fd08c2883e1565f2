"""`kelvin models ladder`: set which answers a model degrades before it refuses requests."""

from collections.abc import Iterator, Sequence
from math import inf, isfinite
from typing import Any, Final

import click

from kelvin.cli.base.api_client import current_target, decode_json_object, json_option
from kelvin.cli.base.tables import print_json
from kelvin.contracts.numbers import parse_whole_number

_ORDER: Final = ("cap-output", "fallback", "cached")  # steps with the same wait: the mildest first

_VALUES: Final = {"cap-output": "tokens", "fallback": "model", "cached": "age_s"}


@click.command("ladder")
@click.argument("model")
@click.option("--cap-output", multiple=True, metavar="TOKENS[@SECONDS]", help="Cut answers after TOKENS tokens.")
@click.option("--fallback", multiple=True, metavar="MODEL[@SECONDS]", help="Answer with another model.")
@click.option("--cached", multiple=True, metavar="AGE[@SECONDS]", help="Repeat an answer of up to AGE seconds ago.")
@click.option("--plan", metavar="NAME", help="Set steps for tenants of this plan, instead of the steps for all.")
@click.option("--off", is_flag=True, help="Remove all steps: never degrade.")
@click.option("--as-others", is_flag=True, help="With --plan: remove the plan's own steps.")
@json_option
def degradation_command(
    model: str, plan: str | None, off: bool, as_others: bool, as_json: bool, **given: tuple[str, ...]
) -> None:
    """Degrade answers instead of refusing requests.

    A step applies when the expected wait reaches SECONDS; without SECONDS, only when the request would be refused.
    Without options, print what is set. Example:

    \b
    kelvin models ladder tinylm --cap-output 256@2 --fallback smaller
    """
    steps = read_steps(given["cap_output"], given["fallback"], given["cached"])
    if steps and (off or as_others):
        raise click.UsageError(f"{'--off' if off else '--as-others'}: give no steps with it")
    if as_others and (off or plan is None):
        raise click.UsageError("--as-others: give a --plan with it, and no --off")
    with current_target().client() as client:
        shown = decode_json_object(client.get(f"/admin/v1/models/{model}"))
        answer = {"steps": shown["ladder"], "plans": shown["plan_ladders"]}
        if steps or off or as_others:
            body = replace_plan_steps(answer, None if as_others else steps, plan)
            answer = decode_json_object(client.put(f"/admin/v1/models/{model}/ladder", json=body))
    if as_json:
        print_json(answer)
        return
    click.echo("\n".join(degradation_lines(model, answer)))


def replace_plan_steps(ladder: dict[str, Any], steps: list[dict[str, Any]] | None, plan: str | None) -> dict[str, Any]:
    """Return the ladder with these steps for the plan, or for all tenants if `plan` is None. If `steps` is None, the
    plan's own steps are removed.
    """
    if plan is None:
        return ladder | {"steps": steps}
    others = {name: steps_of_plan for name, steps_of_plan in ladder["plans"].items() if name != plan}
    return ladder | {"plans": others if steps is None else others | {plan: steps}}


def degradation_lines(model: str, ladder: dict[str, Any]) -> Iterator[str]:
    """Yield the steps for all tenants, then those of each plan that has its own."""
    yield from list(step_lines(ladder["steps"])) or [f"{model}: gives up nothing"]
    for plan, steps in sorted(ladder["plans"].items()):
        yield f"plan {plan}:"
        yield from (f"  {line}" for line in list(step_lines(steps)) or ["gives up nothing"])


def read_steps(caps: Sequence[str], fallbacks: Sequence[str], cached: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Parse VALUE[@SECONDS] options into steps, ordered by their waits. Raises UsageError."""
    steps = [
        *(
            {"step": "cap-output", "tokens": _parse_whole("--cap-output", value), **wait}
            for value, wait in map(_split_wait, caps)
        ),
        *({"step": "fallback", "model": value, **wait} for value, wait in map(_split_wait, fallbacks)),
        *(
            {"step": "cached", "age_s": _parse_whole("--cached", value), **wait}
            for value, wait in map(_split_wait, cached)
        ),
    ]
    return sorted(steps, key=lambda step: (step.get("wait_s", inf), _ORDER.index(step["step"])))


def step_lines(steps: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each step that says when it applies."""
    for step in steps:
        when = "instead of a refusal" if step["wait_s"] is None else f"from {step['wait_s']:g} s of expected wait"
        yield f"{step['step']} {step[_VALUES[step['step']]]}: {when}"


def _split_wait(text: str) -> tuple[str, dict[str, float]]:
    value, at, seconds = text.partition("@")
    if not at:
        return value, {}
    try:
        wait_s = float(seconds)
    except ValueError:
        wait_s = inf
    if not isfinite(wait_s):
        raise click.UsageError(f"{text}: after the @ must be seconds")
    return value, {"wait_s": wait_s}


def _parse_whole(option: str, text: str) -> int:
    if (number := parse_whole_number(text)) is None:
        raise click.UsageError(f"{option} {text}: must be a whole number")
    return number
