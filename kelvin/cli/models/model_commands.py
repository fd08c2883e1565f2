"""Commands about models: list, deploy, split, stop and delete them, grant access, replace their replicas."""

import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import click
import httpx
from rich.table import Table

from kelvin.cli.base.api_client import (
    CommandFailed,
    call_json,
    current_target,
    decode_json_object,
    json_option,
    tenant_query,
)
from kelvin.cli.base.tables import format_instant, print_json, print_table
from kelvin.cli.models.degradation_commands import degradation_command
from kelvin.cli.operations.render_commands import render_command
from kelvin.contracts.names import parse_reference
from kelvin.contracts.numbers import parse_whole_number
from kelvin.doctor.disk_checks import judge_space
from kelvin.doctor.finding_policy import FindingLevel, format_bytes
from kelvin.process.exit_log import describe_exit

POLL_S: Final = 0.2
UNAVAILABLE_LIMIT_S: Final = 60.0  # the control plane may restart meanwhile


@click.command("status")
@json_option
def status_command(as_json: bool) -> None:
    """Show models and, to operators, processes. Models are those of the key's tenant."""
    try:
        found = call_json("GET", "/admin/v1/status")
    except CommandFailed as closed:
        if closed.status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        raise CommandFailed(
            f"{closed.message}: the activator answers, the control plane does not. It is started again by itself; "
            "`kelvin logs controlplane` shows what happened",
            closed.status,
        ) from closed
    if as_json:
        print_json(found)
        return
    if found["processes"]:  # empty unless the key is an operator's
        processes = Table("process", "healthy", "ready", title="processes")
        for row in found["processes"]:
            processes.add_row(row["name"], _check_mark(row["healthy"]), _check_mark(row["ready"]))
        print_table(processes)
        for line in exit_lines(found["processes"], found.get("replica_exits")):
            click.echo(line)
        for line in disk_lines(found.get("disk")):
            click.echo(line)
        if found["device"] is not None:  # None on a cluster, whose nodes hold cache and devices
            click.echo(cache_line(found["cache"]))
            click.echo("\n".join(standby_lines(found["device"])))
        for line in (*pool_lines(found["pools"]), *pending_lines(found["pending"])):
            click.echo(line)
    _print_models(found["models"])


@click.group("models", invoke_without_command=True)
@json_option
@click.pass_context
def models_command(context: click.Context, as_json: bool) -> None:
    """List models, or run COMMAND. Shows aliases and replicas of the key's tenant's models."""
    if context.invoked_subcommand is not None:
        return
    found = call_json("GET", "/admin/v1/models")
    if as_json:
        print_json(found)
        return
    _print_models(found["models"])


@models_command.command("delete")
@click.argument("model")
@click.option("--force", is_flag=True, help="Delete it even if an alias points to it or it serves requests.")
def delete_command(model: str, force: bool) -> None:
    """Delete a model with all its versions. Running requests are finished. Usage stays in the ledger. `kelvin collect
    --run` frees the bytes once the versions have been unused for the grace period.
    """
    deleted = call_json("DELETE", f"/admin/v1/models/{model}", params={"force": "true"} if force else {})
    freed = "`kelvin collect --run` frees their bytes after the grace period"
    click.echo(f"deleted {model}, {len(deleted['versions'])} versions; {freed}")


for _command in (degradation_command, render_command):
    models_command.add_command(_command)


@models_command.command("split")
@click.argument("model")
@click.argument("weights", nargs=-1, metavar="[VERSION=WEIGHT]...")
@json_option
def split_command(model: str, weights: tuple[str, ...], as_json: bool) -> None:
    """Split a model's requests among its versions.

    \b
    kelvin models split tinylm 0123456789ab=90 ba9876543210=10

    Name versions by 12 or more hex digits. Requests of one session or key always go to the same version. Without
    versions, or after a deploy, `prod` gets all requests again.
    """
    body = {"weights": read_weights(weights)}
    answer = call_json("PUT", f"/admin/v1/models/{model}/split", json=body)
    if as_json:
        print_json(answer)
        return
    click.echo("\n".join(split_lines(answer["weights"])) or f"{model}: prod gets all requests")


def read_weights(arguments: Sequence[str]) -> dict[str, int]:
    """Parse VERSION=WEIGHT arguments. Raises UsageError."""
    found: dict[str, int] = {}
    for each in arguments:
        version, _, weight = each.partition("=")
        number = parse_whole_number(weight)
        if not version or number is None or version in found:
            raise click.UsageError(f"{each}: must be VERSION=WEIGHT, a whole number, each version once")
        found[version] = number
    return found


def split_lines(weights: Mapping[str, int]) -> Iterator[str]:
    """Yield each version with its share, the largest first."""
    total = sum(weights.values())
    for version, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        yield f"{version[:12]} {weight} ({weight / total:.1%})"


def disk_lines(disk: dict[str, Any] | None) -> Iterator[str]:
    """Yield a line if the data directory's disk is almost full. `disk` is None on a cluster and in older builds."""
    if disk is not None:
        found = judge_space(disk["free_bytes"], disk["total_bytes"], disk["free_inodes"])
        if found.level is FindingLevel.FAIL:
            yield f"disk of the data directory: {found.seen}: {found.cost}; `kelvin doctor` says what to do"


def cache_line(cache: dict[str, Any] | None) -> str:
    """Describe the faults that the weight cache has found since its start, and how they were handled."""
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
    doubts = f"; {unverified} loads of versions without a trusted signature" if unverified else ""
    examined = sum(cache["examined_chunks"].values())
    pids = {pid for damage in cache["damaged"] for pid in damage["pids"]}
    damaged = f"; {len(pids)} processes have wrong memory mapped, and are being replaced" if pids else ""
    return (
        f"weight cache: faulty copies: {', '.join(faults) or 'none'}; healed {healed}, chunks refused {refused}; "
        f"{examined} checked again in {cache['sweeps']} passes{damaged}{doubts}"
    )


def standby_lines(device: dict[str, Any]) -> Iterator[str]:
    """Yield parked and wanted standbys with the reason, how starts fared, and the memory they use."""
    for pool in device["pools"]:
        found = f"{pool['hits']} starts found one, {pool['misses']} did not"
        yield f"standbys ({pool['device']}): {pool['parked']} parked, {pool['wanted']} wanted ({pool['why']}); {found}"
        yield (
            f"  {pool['starts_per_s']:.3g} taken per second, replaced in {pool['replaced_in_s']:.2g} s:"
            f" {pool['probability']:.2%} of starts find one (target {pool['target']:.4g})"
        )
        private_size, budget = format_bytes(pool["memory"]["private"]), format_bytes(pool["budget_bytes"])
        shared, zygote = format_bytes(pool["memory"]["pss"]), format_bytes(device["zygote"]["pss"])
        yield f"  memory: {private_size} private (budget {budget}), {shared} with their share of the zygote's {zygote}"


def pending_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield replicas that wait for a node or a device slot, grouped by what they need."""
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
    """Yield a cluster's shared standby pods by state."""
    for row in rows:
        counts_text = ", ".join(f"{count} {state}" for state, count in row["pods"].items())
        yield f"waiting pods ({row['name']}): {row['wanted']} wanted; {counts_text or 'none there'}"


def exit_lines(processes: list[dict[str, Any]], replicas: dict[str, Any] | None = None) -> Iterator[str]:
    """Yield how often each process has ended since the installation began, when last, and how. `replicas` counts
    replicas that were killed because they hung.
    """
    ended = [
        (row["name"], row["exits"], row["last_exit_at_s"], row["last_exit"])
        for row in processes
        if row.get("last_exit")  # absent in a control plane of an older build
    ]
    if replicas is not None:
        ended.append((replicas["name"], replicas["count"], replicas["last_at_s"], replicas["last"]))
    for name, count, at_s, how in ended:
        times = "once" if count == 1 else f"{count} times"
        yield f"{name}: ended {times}, last {format_instant(at_s)} UTC: {how}"


def failure_lines(models: list[dict[str, Any]]) -> Iterator[str]:
    """Yield why a version does not start, or how the last start of a model without a ready replica failed."""
    for row in models:
        # A control plane of an older build reports no problems.
        versions = row.get("versions", ())
        problems = {each["version"]: each["start_problem"] for each in versions if each.get("start_problem")}
        for version, problem in problems.items():
            yield f"{row['model']}@{version[:12]}: {problem['message']}"
        last = row["last_restore"]
        if not problems and row["state"] != "ready" and last is not None and last["failure"] is not None:
            yield f"{row['model']}: its last start: {last['failure']}"


def death_lines(models: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line per version whose replica ended unexpectedly: the last such replica, when and how."""
    for row in models:
        for version in row.get("versions", ()):
            if (death := version.get("last_death")) is not None:  # absent in a control plane of an older build
                yield (
                    f"{row['model']}@{version['version'][:12]}: replica {death['runtime_id']} ended unexpectedly,"
                    f" {format_instant(death['at_s'])} UTC: {describe_exit(death['exit_status'])}"
                )


def _check_mark(good: bool) -> str:
    return "yes" if good else "NO"


def fallback_version_lines(models: list[dict[str, Any]]) -> Iterator[str]:
    """Yield which older version answers requests that a newly deployed version can't serve yet."""
    for row in models:
        for new, old in row.get("meanwhile", {}).items():  # absent in a control plane of an older build
            yield f"{row['model']}: {old[:12]} serves what {new[:12]} can't serve yet"


def outdated_lines(models: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the versions of a cluster that still run an older image, since when and why."""
    for row in models:
        for version in row.get("versions", ()):
            if (behind := version.get("image_behind")) is not None:  # absent in a control plane of an older build
                since = format_instant(behind["since_s"])
                yield (
                    f"{row['model']}@{version['version'][:12]}: image behind since {since} UTC"
                    f" ({behind['reason']}): {behind['message']}"
                )


def _print_models(models: list[dict[str, Any]]) -> None:
    print_table(_model_table(models))
    for line in (
        *failure_lines(models),
        *death_lines(models),
        *fallback_version_lines(models),
        *outdated_lines(models),
    ):
        click.echo(line)


def _model_table(models: list[dict[str, Any]]) -> Table:
    table = Table("model", "prod", "versions", "state", "replicas", "min-max", "grants", title="models")
    for row in models:
        scale = row["scale"]
        bounds = f"{scale['min']}-{scale['max']}"
        shared = "\n".join(f"{version[:12]}={weight}" for version, weight in row["split"].items())
        version = shared or row["aliases"].get("prod", "")[:12]
        versions = sum(each["health"] != "deleted" for each in row["versions"])
        grants = str(len(row["grantees"]) or "")
        table.add_row(row["model"], version, str(versions), row["state"], str(row["replicas"]), bounds, grants)
    return table


@click.command("deploy")
@click.argument("reference", metavar="M@VERSION")
def deploy_command(reference: str) -> None:
    """Point the alias `prod` at a version.

    VERSION is 12 or more hex digits, as in `kelvin deploy tinylm@0123456789ab`.
    """
    model, digits = split_reference(reference)
    answer = call_json("POST", f"/admin/v1/models/{model}/deploy", json={"version": digits})
    click.echo(f"{model}@prod -> {answer['version']}")


def split_reference(reference: str) -> tuple[str, str]:
    """Return the model and the version's digits. Raises UsageError if the reference holds no version digits."""
    found = parse_reference(reference)
    if found.version_prefix is None:
        raise click.UsageError(f"{reference}: must be MODEL@VERSION with 12 or more hex digits of the version")
    return found.model, found.version_prefix


@click.command("stop")
@click.argument("model")
def stop_command(model: str) -> None:
    """Scale a model to zero now. The next request starts it again."""
    with current_target().client() as client:
        client.post(f"/admin/v1/models/{model}/stop")
    click.echo(f"{model}: stopping")


_OWNER = click.option("--owner", help="Tenant that owns the model; for operators. [default: the key's own tenant]")


@models_command.command("grant")
@click.argument("model")
@click.argument("tenant")
@_OWNER
def grant_command(model: str, tenant: str, owner: str | None) -> None:
    """Let another tenant call all versions of a model. The other tenant calls it OWNER/MODEL and pays for its own
    requests.
    """
    _change_grant("PUT", model, tenant, owner, "may call")


@models_command.command("revoke")
@click.argument("model")
@click.argument("tenant")
@_OWNER
def revoke_command(model: str, tenant: str, owner: str | None) -> None:
    """Stop another tenant from calling a model. Running requests are finished."""
    _change_grant("DELETE", model, tenant, owner, "may no longer call")


@models_command.command("grants")
@click.option("--tenant", help="Another tenant; for operators. [default: the key's own]")
@json_option
def grants_command(tenant: str | None, as_json: bool) -> None:
    """List grants that the tenant has given, and those that it has received."""
    found = call_json("GET", "/admin/v1/grants", params=tenant_query(tenant))
    if as_json:
        print_json(found)
        return
    table = Table("model", "may be called by", title="grants")
    for row in (*found["given"], *found["had"]):
        table.add_row(f"{row['owner']}/{row['model']}", row["grantee"])
    print_table(table)


def _change_grant(method: str, model: str, tenant: str, owner: str | None, now: str) -> None:
    found = call_json(method, f"/admin/v1/models/{model}/grants/{tenant}", params=tenant_query(owner))
    late = "" if found["told"] else "; an activator has not taken it yet"
    click.echo(f"{tenant} {now} {found['owner']}/{model}{late}")


@models_command.command("restart")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print the API's last JSON response, and no progress.")
def restart_command(model: str, as_json: bool) -> None:
    """Replace all replicas of a model under load.

    Replicas are replaced one after another; returns when the old ones are gone. If a device slot is free, the new
    replica serves before the old one is drained; else callers wait in between. The replacement continues if this
    command is interrupted.
    """
    path = f"/admin/v1/models/{model}/restart"
    with current_target().client() as client:
        ordered = found = decode_json_object(client.post(path))
        shown = _print_progress(None, found, as_json)
        while found["state"] == "running":
            time.sleep(POLL_S)
            found = _poll_replacement(client, path)
            if found["order"] != ordered["order"]:
                raise CommandFailed(
                    f"{model}: the order ended with its control plane, {_replaced_count(shown)}; order it again"
                )
            shown = _print_progress(shown, found, as_json)
    if as_json:
        print_json(found)
    if found["state"] == "failed":
        raise CommandFailed(f"{model}: {found['reason']}; {_replaced_count(found)}")
    if not as_json:
        click.echo(f"{model}: restarted, {_replaced_count(found)}")


def _poll_replacement(client: httpx.Client, path: str) -> dict[str, Any]:
    """Return the progress. While the control plane is down, retry for UNAVAILABLE_LIMIT_S. Raises CommandFailed."""
    limit = time.monotonic() + UNAVAILABLE_LIMIT_S
    while True:
        try:
            answer: dict[str, Any] = decode_json_object(client.get(path))
        except (CommandFailed, httpx.TransportError) as error:
            if (
                getattr(error, "status", HTTPStatus.SERVICE_UNAVAILABLE) != HTTPStatus.SERVICE_UNAVAILABLE
                or time.monotonic() > limit
            ):
                raise
            time.sleep(POLL_S)
        else:
            return answer


def _print_progress(before: dict[str, Any] | None, found: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """Print how many replicas were replaced, if that changed. Return `found`."""
    if not as_json and found["replaced"] and (before is None or found["replaced"] != before["replaced"]):
        click.echo(_replaced_count(found))
    return found


def _replaced_count(found: dict[str, Any]) -> str:
    return f"{found['replaced']} of {found['replicas']} replicas replaced"
