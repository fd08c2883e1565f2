"""Commands about models: what there is, which version serves, how it scales, and the timeline of a request."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.table import Table

from contracts.control import TimelineAnswer
from contracts.names import parse_reference
from contracts.numbers import whole_number
from contracts.timeline import Stage
from contracts.wire import BadJson, decode_any, decoder
from kelvin.client import DoorClosed, json_of, target
from kelvin.floors import BadReport, read_floor_us
from kelvin.grants import grant_command, grants_command, revoke_command
from kelvin.instants import instant
from kelvin.ladder import ladder_command
from kelvin.model_restart import restart_command
from kelvin.policy.findings import as_bytes
from kelvin.render import render_command
from kelvin.tables import print_table
from kelvin.waterfall import waterfall
from service.arguments import Number

Command = TypeVar("Command", bound=Callable[..., object])


def _json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print the API's answer as it is.")(command)


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


@click.command("status")
@_json_option
def status_command(as_json: bool) -> None:
    """Show the installation's processes, to operators, and the models of the key's tenant."""
    with target().door() as door:
        try:
            found = json_of(door.get("/admin/v1/status"))
        except DoorClosed as closed:
            if closed.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            raise DoorClosed(
                f"{closed.message}: the activator answers, the control plane does not. It is started again by itself; "
                "`kelvin logs controlplane` shows what happened",
                closed.status,
            ) from closed
    if as_json:
        _print_json(found)
        return
    if found["processes"]:  # told to operators
        processes = Table("process", "healthy", "ready", title="processes")
        for row in found["processes"]:
            processes.add_row(row["name"], _mark(row["healthy"]), _mark(row["ready"]))
        print_table(processes)
        for line in exit_lines(found["processes"], found.get("replica_exits")):
            click.echo(line)
        if found["device"] is not None:  # a cluster has them on its nodes
            click.echo(cache_line(found["cache"]))
            click.echo("\n".join(standby_lines(found["device"])))
        for line in (*pool_lines(found["pools"]), *pending_lines(found["pending"])):
            click.echo(line)
    _print_models(found["models"])


@click.group("models", invoke_without_command=True)
@_json_option
@click.pass_context
def models_command(context: click.Context, as_json: bool) -> None:
    """List the models of the key's tenant, their aliases, and what runs of them, or do what COMMAND says."""
    if context.invoked_subcommand is not None:
        return
    with target().door() as door:
        found = json_of(door.get("/admin/v1/models"))
    if as_json:
        _print_json(found)
        return
    _print_models(found["models"])


@models_command.command("delete")
@click.argument("model")
@click.option("--force", is_flag=True, help="Also one that an alias names, or that serves.")
def delete_command(model: str, force: bool) -> None:
    """Delete a model with all its versions. What its replicas are answering is finished; its usage stays in the ledger.

    Its bytes stay until `kelvin collect --run` has found it so for the grace period.
    """
    with target().door() as door:
        gone = json_of(door.delete(f"/admin/v1/models/{model}", params={"force": "true"} if force else {}))
    freed = "`kelvin collect --run` frees their bytes after the grace period"
    click.echo(f"deleted {model}, {len(gone['versions'])} versions; {freed}")


for _command in (grant_command, revoke_command, grants_command, ladder_command, render_command, restart_command):
    models_command.add_command(_command)


@models_command.command("split")
@click.argument("model")
@click.argument("weights", nargs=-1, metavar="[VERSION=WEIGHT]...")
@_json_option
def split_command(model: str, weights: tuple[str, ...], as_json: bool) -> None:
    """Share what is asked of a model among versions of it (12 or more hex digits), by weight: `A=90 B=10`. Who asks, by
    session or key, has the same version each time. Without versions, or by a deploy, `prod` has it all again.
    """
    body = {"weights": read_weights(weights)}
    with target().door() as door:
        answer = json_of(door.put(f"/admin/v1/models/{model}/split", json=body))
    if as_json:
        _print_json(answer)
        return
    click.echo("\n".join(split_lines(answer["weights"])) or f"{model}: all is prod's")


def read_weights(given: Sequence[str]) -> dict[str, int]:
    """Of VERSION=WEIGHT. Raises UsageError."""
    found: dict[str, int] = {}
    for each in given:
        version, _, weight = each.partition("=")
        number = whole_number(weight)
        if not version or number is None or version in found:
            raise click.UsageError(f"{each}: must be VERSION=WEIGHT, a whole number, each version once")
        found[version] = number
    return found


def split_lines(weights: Mapping[str, int]) -> Iterator[str]:
    """Each version with its share, the largest first."""
    total = sum(weights.values())
    for version, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        yield f"{version[:12]} {weight} ({weight / total:.1%})"


def cache_line(cache: dict[str, Any] | None) -> str:
    """What the weight cache found faulty since it started, and what became of it."""
    if cache is None:
        return "weight cache: does not answer"
    faults = [
        f"{tier} {what} {kind} {count}"
        for what in ("chunk", "manifest", "attestation")
        for tier, kinds in cache[f"{what}_faults"].items()
        for kind, count in kinds.items()
    ]
    healed = sum((*cache["healed_chunks"].values(), *cache["healed_manifests"].values()))
    refused = sum(cache["refused_chunks"].values())
    unverified = cache["unverified_versions"]
    doubts = f"; {unverified} loads of versions that nobody vouches for" if unverified else ""
    examined = sum(cache["examined_chunks"].values())
    pids = {pid for damage in cache["damaged"] for pid in damage["pids"]}
    damaged = f"; {len(pids)} processes have wrong memory mapped, and are being replaced" if pids else ""
    return (
        f"weight cache: faulty copies: {', '.join(faults) or 'none'}; healed {healed}, chunks refused {refused}; "
        f"{examined} hashed anew in {cache['sweeps']} passes{damaged}{doubts}"
    )


def standby_lines(device: dict[str, Any]) -> Iterator[str]:
    """How many standbys there are and should be, why, how starts fared, and what all of it takes of memory."""
    for pool in device["pools"]:
        found = f"{pool['hits']} starts found one, {pool['misses']} did not"
        yield f"standbys ({pool['device']}): {pool['parked']} parked, {pool['wanted']} wanted ({pool['why']}); {found}"
        yield (
            f"  {pool['starts_per_s']:.3g} taken per second, made up for in {pool['replaced_in_s']:.2g} s:"
            f" {pool['probability']:.2%} find one (target {pool['target']:.4g})"
        )
        own, budget = as_bytes(pool["memory"]["private"]), as_bytes(pool["budget_bytes"])
        shared, zygote = as_bytes(pool["memory"]["pss"]), as_bytes(device["zygote"]["pss"])
        yield f"  memory: {own} of their own (budget {budget}), {shared} with their part of the zygote's; it: {zygote}"


def pending_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Replicas that are wanted and have no node, or no device slot, by what they ask for."""
    for row in rows:
        if not row["replicas"]:
            continue
        where = "" if row["zone"] == "any" else f" in {row['zone']}"
        spot = {"only": ", on spot capacity alone", "may": ", on spot capacity, too"}.get(row["spot"], "")
        waited = "" if row["waited_s"] is None else f": {row['waited_s']:.0f} s by now"
        known = "expected" if row["measured"] else "guessed"
        expected = "" if row["node_s"] is None else f", {row['node_s']:.0f} s {known} in all"
        count = "1 replica" if row["replicas"] == 1 else f"{row['replicas']} replicas"
        yield f"pending ({row['device']}{where}{spot}): {count}{waited}{expected}"


def pool_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Pods of a cluster that versions share, by what they do."""
    for row in rows:
        there = ", ".join(f"{count} {state}" for state, count in row["pods"].items())
        yield f"pods that wait ({row['name']}): {row['wanted']} wanted; {there or 'none there'}"


def exit_lines(processes: list[dict[str, Any]], replicas: dict[str, Any] | None = None) -> Iterator[str]:
    """Say how often each process has ended since the installation began, when last, and how. `replicas` counts those
    that were killed because they hung.
    """
    ended = [
        (row["name"], row["exits"], row["last_exit_at_s"], row["last_exit"])
        for row in processes
        if row.get("last_exit")  # a control plane of an older build does not say
    ]
    if replicas is not None:
        ended.append((replicas["name"], replicas["count"], replicas["last_at_s"], replicas["last"]))
    for name, count, at_s, how in ended:
        times = "once" if count == 1 else f"{count} times"
        yield f"{name}: ended {times}, last {instant(at_s)} UTC: {how}"


def failure_lines(models: list[dict[str, Any]]) -> Iterator[str]:
    """Say of each version why it does not start; else of a model of which nothing is ready how its last start went."""
    for row in models:
        # A control plane of an older build says nothing of problems.
        versions = row.get("versions", ())
        problems = {each["version"]: each["start_problem"] for each in versions if each.get("start_problem")}
        for version, problem in problems.items():
            yield f"{row['model']}@{version[:12]}: {problem['message']}"
        last = row["last_restore"]
        if not problems and row["state"] != "ready" and last is not None and last["failure"] is not None:
            yield f"{row['model']}: its last start: {last['failure']}"


def _mark(good: bool) -> str:
    return "yes" if good else "NO"


def overlap_lines(models: list[dict[str, Any]]) -> Iterator[str]:
    """Of each model of which a version was only just named, which one answers what that can't yet."""
    for row in models:
        for new, old in row.get("meanwhile", {}).items():  # a control plane of an older build says nothing of it
            yield f"{row['model']}: {old[:12]} answers what {new[:12]} can't take yet"


def behind_lines(models: list[dict[str, Any]]) -> Iterator[str]:
    """Of each version of a cluster that still runs the image of before, since when and why."""
    for row in models:
        for version in row.get("versions", ()):
            if (behind := version.get("image_behind")) is not None:  # a control plane of an older build does not say
                since = instant(behind["since_s"])
                yield (
                    f"{row['model']}@{version['version'][:12]}: image behind since {since} UTC"
                    f" ({behind['reason']}): {behind['message']}"
                )


def _print_models(models: list[dict[str, Any]]) -> None:
    print_table(_model_table(models))
    for line in (*failure_lines(models), *overlap_lines(models), *behind_lines(models)):
        click.echo(line)


def _model_table(models: list[dict[str, Any]]) -> Table:
    table = Table("model", "prod", "versions", "state", "replicas", "min-max", "grants", title="models")
    for row in models:
        scale = row["scale"]
        bounds = f"{scale['min']}-{scale['max']}"
        shared = "\n".join(f"{version[:12]}={weight}" for version, weight in row["split"].items())  # as it was set
        version = shared or row["aliases"].get("prod", "")[:12]
        versions = sum(each["health"] != "deleted" for each in row["versions"])
        grants = str(len(row["grantees"]) or "")
        table.add_row(row["model"], version, str(versions), row["state"], str(row["replicas"]), bounds, grants)
    return table


@click.command("deploy")
@click.argument("reference", metavar="M@VERSION")
def deploy_command(reference: str) -> None:
    """Move the alias `prod` of a model to one of its versions (12 or more hex digits)."""
    found = parse_reference(reference)
    if found.version_prefix is None:
        raise click.UsageError(f"{reference}: must be MODEL@VERSION with 12 or more hex digits of the version")
    with target().door() as door:
        answer = json_of(door.post(f"/admin/v1/models/{found.model}/deploy", json={"version": found.version_prefix}))
    click.echo(f"{found.model}@prod -> {answer['version']}")


@click.command("stop")
@click.argument("model")
def stop_command(model: str) -> None:
    """Take a model to zero now; the next request starts it again."""
    with target().door() as door:
        door.post(f"/admin/v1/models/{model}/stop")
    click.echo(f"{model}: stopping")


@click.command("timeline")
@click.argument("request_id")
@click.option("--floor-ms", type=Number(0), help="Draw this measured floor beside it.")
@click.option(
    "--floor",
    "report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the floor of a report of `kelvin bench cold --json`, for the measured size next to the model's.",
)
@_json_option
def timeline_command(request_id: str, floor_ms: float | None, report: Path | None, as_json: bool) -> None:
    """Draw the stages of one request from its arrival to its first token, beside the floor.

    It needs a key of the request's tenant with the scope `infer`. The default is default.key, not admin.key.
    """
    with target().door("default.key") as door:
        raw = door.get(f"/v1/requests/{request_id}/timeline").content
    try:
        if as_json:
            _print_json(decode_any(raw))
            return
        answer = decoder(TimelineAnswer).decode(raw)
        floor_us = None if floor_ms is None else round(floor_ms * 1000)
        if report is not None:
            floor_us = read_floor_us(report, _weight_bytes(answer))
    except BadJson as error:
        raise DoorClosed(f"the timeline does not decode: {error}") from error
    except BadReport as error:
        raise click.UsageError(str(error)) from error
    reached = any(stamp.stage == Stage.DISPATCHED for stamp in answer.stamps)
    kind = "cold" if answer.cold else "warm" if reached else "reached no replica"
    click.echo(f"{answer.request_id}  {answer.model}@{(answer.version or '')[:12]}  {kind}")
    click.echo(waterfall(answer.stamps, floor_us))
    if answer.start_problem is not None:
        click.echo(f"no replica came ({answer.start_problem.reason}): {answer.start_problem.message}")
    if report is not None and floor_us is None:
        click.echo(f"no floor: {report.name} holds no model of about this size")


def _weight_bytes(answer: TimelineAnswer) -> int:
    """Bytes of the weights of the request's version; 0 of another tenant's, which only that one sees."""
    if "/" in answer.model:
        return 0
    with target().door() as door:
        found = json_of(door.get(f"/admin/v1/models/{answer.model}"))
    return next((int(row["weight_bytes"]) for row in found["versions"] if row["version"] == answer.version), 0)
