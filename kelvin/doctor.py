"""`kelvin doctor`: what this machine and this configuration cost, each finding with its mend. Changes nothing."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import click

from kelvin.client import DoorClosed, target
from kelvin.policy.certificates import judge_certificate_files
from kelvin.policy.configuration import Place, judge_names, judge_values
from kelvin.policy.findings import Finding, Level, fails
from kelvin.policy.guarding import OF_POSTGRESQL, judge_backups, judge_certificate, judge_files
from kelvin.policy.machine import judge_clock, judge_devices, judge_disk, judge_kernel, judge_limits, judge_memory
from kelvin.probes.certificates import look_at_certificates
from kelvin.probes.devices import look_at_devices
from kelvin.probes.disk import READ_BYTES, look_at_disk
from kelvin.probes.guards import (
    authority_times_s,
    is_running,
    leaf_left_s,
    look_at_backups,
    look_at_secrets,
)
from kelvin.probes.kernel import look_at_clock, look_at_kernel, look_at_limits, wall_minus_monotonic_s
from kelvin.probes.memory import look_at_memory
from kelvin.probes.services import ask_services
from kelvin.settings import doctor_environment
from service.private import keep_secrets

FAILING_EXIT: Final = 1
_WIDTH: Final = 22


def examine(data: Path, environment: Mapping[str, str], read_bytes: int) -> Iterator[Finding]:
    """Yield the findings; the disk, which takes longest, is measured first.

    Raises PermissionError if a file of the data directory can't be looked at.
    """
    before_s = wall_minus_monotonic_s()
    yield from judge_disk(look_at_disk(data, read_bytes=read_bytes))
    memory, limits = look_at_memory(), look_at_limits()
    yield from judge_memory(memory)
    yield from judge_limits(limits, _whole(environment, "KELVIN_CONNECTIONS", 8192))
    yield from judge_kernel(look_at_kernel())
    yield from judge_devices(look_at_devices())
    yield from judge_names(environment)
    bound = min(memory.total_bytes, memory.cgroup_bytes or memory.total_bytes)
    yield from judge_values(environment, Place(bound, limits.cores))
    yield from ask_services(environment)
    yield from judge_files(*look_at_secrets(data))
    running = is_running(data)
    if (data / "ca.pem").exists():
        mend = "remove DATA/ca.pem and DATA/tls/ca.key, restart, and give callers the new ca.pem"
        left_s, begins_in_s = authority_times_s(data)
        yield judge_certificate("of the CA", left_s, mend, begins_in_s)
    if running:
        yield judge_certificate(
            "that callers see", leaf_left_s(data), "restart `kelvin up`: it should have been renewed"
        )
    yield from judge_certificate_files(look_at_certificates(environment))
    if environment.get("KELVIN_DATABASE"):
        yield OF_POSTGRESQL
    else:
        every_s = float(_whole(environment, "KELVIN_BACKUP_S", 240))
        yield from judge_backups(look_at_backups(data, environment.get("KELVIN_BACKUP") or None, every_s, running))
    yield from judge_clock(look_at_clock(before_s, data))


def _whole(environment: Mapping[str, str], name: str, default: int) -> int:
    """A value that is no number is its service's to name."""
    try:
        return int(float(environment[name]))
    except (KeyError, ValueError, OverflowError):
        return default


@click.command("doctor")
@click.option("--store", metavar="URL", help="Ask this store instead of $KELVIN_STORE.")
@click.option(
    "--read-bytes",
    type=click.IntRange(8 << 20, 16 << 30),
    default=READ_BYTES,
    help="Written and read to measure the disk, at most. [default: 128 MiB]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor_command(store: str | None, read_bytes: int, as_json: bool) -> None:
    """Measure the machine and judge the settings of this shell, as `kelvin up` would run with them.

    Works beside a running installation and without one. Exits with 1 where something fails, with 0 otherwise.
    """
    keep_secrets()
    data = target().data.absolute()
    findings = []
    try:
        for finding in examine(data, doctor_environment(data, store), read_bytes):
            findings.append(finding)
            if not as_json:
                _print(finding)
    except PermissionError as error:
        raise DoorClosed(f"{error.filename} can't be read: run doctor as the user of {data}") from error
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        click.echo(json.dumps({"findings": rows, "fails": fails(findings)}, indent=2))
    else:
        counts = ", ".join(f"{sum(finding.level is level for finding in findings)} {level}" for level in Level)
        click.echo(counts)
    if fails(findings):
        sys.exit(FAILING_EXIT)


def _print(finding: Finding) -> None:
    click.echo(f"{finding.level:<5} {finding.check:<{_WIDTH}} {finding.seen}")
    for word, text in (("cost", finding.cost), ("mend", finding.mend)):
        if text:
            click.echo(f"{'':<5} {'':<{_WIDTH}} {word}: {text}")
