"""`kelvin fsck` and `kelvin collect`: check a tenant's objects in the store, and free unused ones."""

import json
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Final

import click
import httpx
import msgspec

from kelvin.cli.artifacts.progress import Progress, open_progress
from kelvin.cli.artifacts.push_client import decode_response, open_client, raise_for_failure
from kelvin.cli.base.api_client import unreachable_error
from kelvin.contracts.artifacts.push_api import (
    CollectReport,
    CollectRequest,
    FsckBroken,
    FsckFinding,
    FsckLine,
    FsckProgress,
    FsckSummary,
)
from kelvin.contracts.errors import Refused, RemoteFailure, Unavailable
from kelvin.contracts.names import require_dns_label
from kelvin.contracts.problem import from_wire
from kelvin.contracts.wire import decode, encode

# The time between two lines: the largest pack is read from a slow store.
LINE_TIMEOUT_S: Final = 600.0
COLLECT_TIMEOUT_S: Final = 600.0


def stream_check(client: httpx.Client) -> Iterator[FsckLine]:
    """Yield lines as they arrive, up to the summary. Raises `Refused`, also if the check was cut short."""
    try:
        with client.stream("POST", "/push/v1/fsck", timeout=LINE_TIMEOUT_S) as answer:
            if not answer.is_success:
                answer.read()
            for raw in _lines(raise_for_failure(answer)):
                line: FsckLine = decode(raw, FsckLine, field="a line of the check")  # type: ignore[arg-type]
                if isinstance(line, FsckBroken):
                    raise Refused(from_wire(line.failure))
                yield line
                if isinstance(line, FsckSummary):
                    return
    except httpx.TransportError as error:
        raise Refused(
            RemoteFailure("unavailable", Unavailable.status, unreachable_error(error).message, None, True)
        ) from error
    raise Refused(Unavailable("the end of the check"))


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    """Split by newline bytes. In text, U+2028 would end a line, too."""
    rest = b""
    for piece in answer.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def read_findings(lines: Iterable[FsckLine], progress: Progress) -> tuple[list[FsckFinding], FsckSummary]:
    """Return all findings and the summary."""
    findings: list[FsckFinding] = []
    summary = None
    done = 0
    for line in lines:
        match line:
            case FsckFinding():
                findings.append(line)
            case FsckProgress(checked_bytes=checked, total_bytes=total):
                if not done:
                    progress.begin("checking", total)
                progress.advance(checked - done)
                done = checked
            case FsckSummary():
                summary = line
    if summary is None:
        raise Refused(Unavailable("the end of the check"))
    return findings, summary


@click.command("fsck")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fsck_command(as_json: bool) -> None:
    """Verify every object and byte of a tenant. Changes nothing. Exits with 1 on findings. Only the key's own tenant is
    read: run it with a key of each tenant (`--key`, scope `admin` or `push`).
    """
    with open_client() as client, open_progress(not as_json) as progress:
        findings, summary = read_findings(stream_check(client), progress)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins({"findings": findings, "summary": summary})))
    else:
        for finding in findings:
            click.echo(f"{finding.key}: {finding.fault}\n  mend: {finding.mend}")
        click.echo(_checked_sentence(summary))
    if findings:
        sys.exit(1)


def _checked_sentence(summary: FsckSummary) -> str:
    checked = f"{summary.versions} versions, {summary.packs} packs, {summary.chunks} chunks"
    unused = f"{summary.unreferenced_chunks} chunks ({summary.unreferenced_bytes} bytes) belong to no version"
    unused += f", {summary.unnamed_versions} versions to no model" if summary.unnamed_versions else ""
    if summary.leftovers:
        unused += f", {summary.leftovers} objects were left by a collection that did not end: the next one frees them"
    faults = f"{summary.findings} faults" if summary.findings else "no fault"
    running = "; a push was running: what looked unfinished was not counted" if summary.pushes_running else ""
    return f"{checked}, {summary.checked_bytes} bytes of the key's tenant checked: {faults}; {unused}{running}"


def request_collection(client: httpx.Client, run: bool, tenant: str | None = None) -> CollectReport:
    """Collect the key's tenant, or for an operator another one. Raises `Refused`."""
    path = "/push/v1/collect" if tenant is None else f"/push/v1/collect?tenant={tenant}"
    body, headers = encode(CollectRequest(run=run)), {"content-type": "application/json"}
    answer = raise_for_failure(client.request("POST", path, content=body, headers=headers, timeout=COLLECT_TIMEOUT_S))
    return decode_response(answer, CollectReport)


@click.command("collect")
@click.option("--run/--dry-run", "run", required=True, help="Free the objects, or only print them.")
@click.option("--tenant", help="Another tenant, even a deleted one; for operators.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def collect_command(run: bool, tenant: str | None, as_json: bool) -> None:
    """Free objects that no version needs. They must have been unused for the grace period. The first run marks a
    version that no model names; a run after the grace period frees it.
    """
    with open_client() as client:
        report = request_collection(client, run, None if tenant is None else require_dns_label(tenant, "tenant"))
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(report)))
        return
    for freed in report.freed:
        click.echo(f"{'freed' if run else 'would free'} {freed.key} ({freed.nbytes} bytes): {freed.reason}")
    for condemned in report.condemned:
        left = timedelta(seconds=condemned.kept_s)
        click.echo(f"no model names version {condemned.version}: kept for {left} more")
    click.echo(_collected_sentence(report))


def _collected_sentence(report: CollectReport) -> str:
    nbytes = sum(freed.nbytes for freed in report.freed)
    did = "freed" if report.ran else "would free"
    kept_text = f"{report.versions} versions and {report.packs} packs are kept"
    unreferenced_text = (
        f", in which {report.unreferenced_bytes} bytes belong to no version" if report.unreferenced_bytes else ""
    )
    dropped = f"; dropped {report.dropped_pushes} pushes that stood still" if report.dropped_pushes else ""
    running = "; a push was running: what it needs is kept" if report.pushes_running else ""
    lost = f"; {report.lost} chunks are in no pack, so no pack is freed: run `kelvin fsck`" if report.lost else ""
    return f"{did} {len(report.freed)} objects, {nbytes} bytes; {kept_text}{unreferenced_text}{dropped}{running}{lost}"
