"""`kelvin timeline`: draw the stages of one request as bars, with this machine's floor.

`kelvin bench cold` measures the floor.
"""

from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

import click
import msgspec

from kelvin.cli.base.api_client import CommandFailed, call_json, current_target, json_option
from kelvin.cli.base.tables import print_json
from kelvin.contracts.serving.control_messages import TimelineAnswer
from kelvin.contracts.timeline import Stage, Stamp
from kelvin.contracts.wire import BadJson, decode_any, decoder
from kelvin.process.option_types import FiniteNumber

BAR_WIDTH: Final = 48
SIZE_RATIO_MAX: Final = 1.25  # sizes that differ by more are not compared


class _Row(msgspec.Struct):
    size_bytes: int
    tier: str
    system: str
    median_s: float


class _Report(msgspec.Struct):
    rows: tuple[_Row, ...]


class BadReport(Exception):
    """The file is not a report of `kelvin bench cold`. The text names the file and the rule."""


def read_floor_us(report: Path, weight_bytes: int) -> int | None:
    """Return the host tier's floor for the measured size nearest to `weight_bytes`, or None. Raises BadReport."""
    try:
        rows = decoder(_Report).decode(report.read_bytes()).rows
    except OSError as error:
        raise BadReport(f"{report}: {error.strerror}") from error
    except BadJson as error:
        raise BadReport(f"{report}: is not a report of kelvin bench cold ({error})") from error
    return choose_floor_us(rows, weight_bytes)


def choose_floor_us(rows: Sequence[_Row], weight_bytes: int) -> int | None:
    """Return the floor of the nearest size by ratio. None if the ratio is above SIZE_RATIO_MAX."""
    floors = [row for row in rows if row.system == "floor" and row.tier == "host"]
    apart = [(max(row.size_bytes, weight_bytes) / max(1, min(row.size_bytes, weight_bytes)), row) for row in floors]
    ratio, row = min(apart, key=lambda pair: pair[0], default=(SIZE_RATIO_MAX + 1, None))
    return None if row is None or ratio > SIZE_RATIO_MAX else round(row.median_s * 1e6)


@click.command("timeline")
@click.argument("request_id")
@click.option("--floor-ms", type=FiniteNumber(0), help="Draw this measured floor.")
@click.option(
    "--floor",
    "report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the floor from a report of `kelvin bench cold --json`, for the measured size nearest to the model's.",
)
@json_option
def timeline_command(request_id: str, floor_ms: float | None, report: Path | None, as_json: bool) -> None:
    """Draw the stages of one request from arrival to first token. It needs a key of the request's tenant with the scope
    `infer`, and for --floor also `admin`. The defaults are default.key, and admin.key for --floor.
    """
    with current_target().client("default.key") as client:
        raw = client.get(f"/v1/requests/{request_id}/timeline").content
    try:
        if as_json:
            print_json(decode_any(raw))
            return
        answer = decoder(TimelineAnswer).decode(raw)
        floor_us = None if floor_ms is None else round(floor_ms * 1000)
        if report is not None:
            weight_bytes = _weight_bytes(answer)
            floor_us = read_floor_us(report, weight_bytes or 0)
    except BadJson as error:
        raise CommandFailed(f"the timeline does not decode: {error}") from error
    except BadReport as error:
        raise click.UsageError(str(error)) from error
    reached = any(stamp.stage == Stage.DISPATCHED for stamp in answer.stamps)
    kind = "cold" if answer.cold else "warm" if reached else "reached no replica"
    click.echo(f"{answer.request_id}  {answer.model}@{(answer.version or '')[:12]}  {kind}")
    click.echo(draw_waterfall(answer.stamps, floor_us))
    if answer.start_problem is not None:
        click.echo(f"no replica came ({answer.start_problem.reason}): {answer.start_problem.message}")
    if report is not None and floor_us is None:
        why = f"{report.name} holds no model of about this size"
        if weight_bytes is None:
            why = "the size of the model is told to keys with the scope `admin`; --floor-ms needs none"
        click.echo(f"no floor: {why}")


def _weight_bytes(answer: TimelineAnswer) -> int | None:
    """Return the weight bytes of the request's version. None if the key may not read them. 0 for another tenant's
    version, which only its owner can see.
    """
    if "/" in answer.model:
        return 0
    try:
        found = call_json("GET", f"/admin/v1/models/{answer.model}")
    except CommandFailed as closed:
        if closed.status != HTTPStatus.FORBIDDEN:
            raise
        return None
    return next((int(row["weight_bytes"]) for row in found["versions"] if row["version"] == answer.version), 0)


def draw_waterfall(stamps: Sequence[Stamp], floor_us: int | None = None, width: int = BAR_WIDTH) -> str:
    """Return one line per stage: name, bar, milliseconds of the stage, milliseconds since arrival. The picture ends
    with the first token; the duration of the rest is a line of text. `floor_us` adds a bar for the machine's floor.
    """
    if not stamps:
        return "(no stages were stamped)"
    begun = [stamp for stamp in stamps if stamp.stage is not Stage.DONE] or list(stamps)
    total_us = max(begun[-1].at_us, floor_us or 0, 1)
    lines, before_us = [], 0
    for stamp in begun:
        lines.append(_line(str(stamp.stage), before_us, stamp.at_us, total_us, width, "█"))
        before_us = stamp.at_us
    if floor_us is not None:
        lines.append(_line("floor", 0, floor_us, total_us, width, "░"))
    if stamps[-1] is not begun[-1]:
        lines.append(f"{'done':>12}   {(stamps[-1].at_us - before_us) / 1000:.1f} ms after that")
    return "\n".join(lines)


def _line(name: str, begin_us: int, end_us: int, total_us: int, width: int, ink: str) -> str:
    left = round(begin_us / total_us * width)
    length = max(1, round(end_us / total_us * width) - left)
    bar = (" " * min(left, width - 1) + ink * length)[:width].ljust(width)
    return f"{name:>12} │{bar}│ {(end_us - begin_us) / 1000:8.1f} ms  {end_us / 1000:8.1f}"
