"""`kelvin doctor`: report problems of this machine and configuration, each with its cost and its fix. Fixes nothing."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import click

from kelvin.cli.base.api_client import CommandFailed, current_target
from kelvin.doctor.certificate_checks import check_certificate_files
from kelvin.doctor.configuration_policy import judge_names, judge_values, number_of
from kelvin.doctor.device_checks import check_devices
from kelvin.doctor.disk_checks import READ_BYTES, check_disk
from kelvin.doctor.finding_policy import Finding, FindingLevel, has_failure
from kelvin.doctor.kernel_checks import (
    check_clock,
    check_kernel,
    check_limits,
    check_memory,
    core_count,
    usable_bytes,
    wall_minus_monotonic_s,
)
from kelvin.doctor.secret_checks import (
    POSTGRES_BACKUP_NOTE,
    check_backups,
    check_certificates,
    check_secrets,
    is_running,
)
from kelvin.doctor.service_checks import check_services
from kelvin.process.hardening import protect_memory
from kelvin.supervisor.settings import doctor_environment

FAILING_EXIT: Final = 1
_WIDTH: Final = 22


def run_checks(data: Path, environment: Mapping[str, str], read_bytes: int) -> Iterator[Finding]:
    """Yield the findings. The disk is measured first, before other checks make the machine busy. Raises PermissionError
    if a file of the data directory can't be read.
    """
    before_s = wall_minus_monotonic_s()
    yield from check_disk(data, read_bytes=read_bytes)
    yield from check_memory()
    yield from check_limits(int(number_of(environment, "KELVIN_CONNECTIONS")))
    yield from check_kernel()
    yield from check_devices()
    yield from judge_names(environment)
    yield from judge_values(environment, usable_bytes(), core_count())
    yield from check_services(environment)
    yield from check_secrets(data)
    running = is_running(data)
    yield from check_certificates(data, running=running)
    yield from check_certificate_files(environment)
    if environment.get("KELVIN_DATABASE"):
        yield POSTGRES_BACKUP_NOTE
    else:
        every_s = number_of(environment, "KELVIN_BACKUP_S")
        yield from check_backups(data, environment.get("KELVIN_BACKUP") or None, every_s, running=running)
    yield from check_clock(before_s, data)


@click.command("doctor")
@click.option("--store", metavar="URL", help="Check this store instead of $KELVIN_STORE.")
@click.option(
    "--read-bytes",
    type=click.IntRange(8 << 20, 16 << 30),
    default=READ_BYTES,
    help="Write and read at most this much to measure the disk. [default: 128 MiB]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor_command(store: str | None, read_bytes: int, as_json: bool) -> None:
    """Check this machine and this shell's settings. Settings are judged as `kelvin up` would use them. Works with and
    without a running installation. Exits with 1 if something fails, else with 0.
    """
    protect_memory()
    data = current_target().data.absolute()
    findings = []
    try:
        for finding in run_checks(data, doctor_environment(data, store), read_bytes):
            findings.append(finding)
            if not as_json:
                _print(finding)
    except PermissionError as error:
        raise CommandFailed(f"{error.filename} can't be read: run doctor as the user of {data}") from error
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        click.echo(json.dumps({"findings": rows, "fails": has_failure(findings)}, indent=2))
    else:
        counts = ", ".join(f"{sum(finding.level is level for finding in findings)} {level}" for level in FindingLevel)
        click.echo(counts)
    if has_failure(findings):
        sys.exit(FAILING_EXIT)


def _print(finding: Finding) -> None:
    click.echo(f"{finding.level:<5} {finding.check:<{_WIDTH}} {finding.seen}")
    for word, text in (("cost", finding.cost), ("mend", finding.mend)):
        if text:
            click.echo(f"{'':<5} {'':<{_WIDTH}} {word}: {text}")
