"""`kelvin fsck`: check every byte and reference of a tenant's store, and say what mends each fault. Exit 1 on any."""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Final

import click
import httpx
import msgspec

from contracts.errors import Refused, RemoteFailure, Unavailable
from contracts.problem import from_wire
from contracts.push import FsckBroken, FsckFinding, FsckLine, FsckProgress, FsckSummary
from contracts.wire import decode
from kelvin.client import failure_of, unreachable
from kelvin.progress import Progress, shown_progress
from kelvin.push_calls import Door, open_door

# Between two lines: the largest pack is read, from a slow store.
SILENCE_S: Final = 600.0


def check_store(door: Door) -> Iterator[FsckLine]:
    """Lines as they come; ends after the summary. Raises `Refused`, also where the check was cut short."""
    try:
        with door.stream("POST", "/push/v1/fsck", timeout=SILENCE_S) as answer:
            if not answer.is_success:
                answer.read()
                raise Refused(failure_of(answer))
            for raw in _lines(answer):
                line: FsckLine = decode(raw, FsckLine, what="a line of the check")  # type: ignore[arg-type]
                if isinstance(line, FsckBroken):
                    raise Refused(from_wire(line.failure))
                yield line
                if isinstance(line, FsckSummary):
                    return
    except httpx.TransportError as error:
        raise Refused(
            RemoteFailure("unavailable", Unavailable.status, unreachable(error).message, None, True)
        ) from error
    raise Refused(Unavailable("the end of the check"))


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    """As bytes: in text, U+2028 would end a line, too."""
    rest = b""
    for piece in answer.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def collect(lines: Iterable[FsckLine], progress: Progress) -> tuple[list[FsckFinding], FsckSummary]:
    """All findings, and the summary."""
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
    """Read every object of the key's tenant, verify each byte and reference. Changes nothing; exit code 1 on findings.

    Other tenants' objects are not read: run it with a key of each (`--key`, scope `admin` or `push`).
    """
    with open_door() as door, shown_progress(not as_json) as progress:
        findings, summary = collect(check_store(door), progress)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins({"findings": findings, "summary": summary})))
    else:
        for finding in findings:
            click.echo(f"{finding.key}: {finding.fault}\n  mend: {finding.mend}")
        click.echo(_sentence(summary))
    if findings:
        sys.exit(1)


def _sentence(summary: FsckSummary) -> str:
    checked = f"{summary.versions} versions, {summary.packs} packs, {summary.chunks} chunks"
    unused = f"{summary.unreferenced_chunks} chunks ({summary.unreferenced_bytes} bytes) belong to no version"
    unused += f", {summary.unnamed_versions} versions to no model" if summary.unnamed_versions else ""
    if summary.leftovers:
        unused += f", {summary.leftovers} objects were left by a collection that did not end: the next one frees them"
    faults = f"{summary.findings} faults" if summary.findings else "no fault"
    running = "; a push was running: what looked unfinished was not counted" if summary.pushes_running else ""
    return f"{checked}, {summary.checked_bytes} bytes of the key's tenant checked: {faults}; {unused}{running}"
