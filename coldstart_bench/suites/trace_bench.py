"""`kelvin bench trace`: send a published trace as a load, and report how close the load came to it (`trace_fit.py`).

A trace has requests with prompt and output lengths. Optionally, windows have the request rates of clients.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import click
import msgspec

from coldstart_bench.harness.activator_testbed import (
    LONG_HEAD_TIMEOUT,
    MODEL,
    UpstreamConfig,
    UpstreamReport,
    cores_note,
    keys_for,
    one_model,
    running_activator,
    running_open_loop,
)
from coldstart_bench.harness.arrivals import renewal, replayed
from coldstart_bench.harness.load_protocol import LoadResult, OpenLoopPlan, RequestTemplate, send_delays_s
from coldstart_bench.report import trace_fit
from coldstart_bench.report.bench_report import BenchFailed
from coldstart_bench.report.order_statistics import quantile_of
from coldstart_bench.report.trace_fit import FigurePair, TraceFigures, TraceFit, TraceOutcome
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option
from kelvin.process.option_types import FiniteNumber

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
T = TypeVar("T")

PROMPT_TOKEN_S: Final = 5e-5  # 20,000 prompt tokens a second
TOKEN_S: Final = 0.01
PATIENCE_S: Final = 120.0
NOTE: Final = "figures of the sent load are from the activator's records; prefixes are from the prompts themselves"


class BadTrace(BenchFailed):
    """A file is not a trace. The text names line and rule."""


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace."""

    at_s: float
    prompt: int  # tokens
    output: int


class ClientWindow(msgspec.Struct, frozen=True):
    """How one client sends requests from `at_s` until its next window."""

    at_s: float
    rate: float  # requests per second
    cv: float  # coefficient of variation of the gaps
    pattern: str  # Gamma or Weibull


class DueRequest(msgspec.Struct, frozen=True):
    """One request of a load: when it is due, its tenant, its lengths."""

    at_us: int
    tenant: int
    prompt: int
    output: int


def parse_trace(text: str) -> list[TraceRow]:
    """Parse an Azure LLM inference trace (time, prompt tokens, output tokens), sorted by time. Raises BadTrace."""
    reader = csv.reader(io.StringIO(text))
    if tuple(next(reader, ())) != COLUMNS:
        raise BadTrace(f"line 1: must be {','.join(COLUMNS)}")
    found = []
    for number, cells in enumerate(reader, 2):
        try:
            when, prompt, output = cells
            row = TraceRow(_seconds(when), int(prompt), int(output))
        except ValueError:
            raise BadTrace(f"line {number}: must be a time and two numbers of tokens") from None
        if row.prompt < 1 or row.output < 1:
            continue  # an empty prompt or output is no load
        found.append(row)
    if len(found) < 2:
        raise BadTrace("must have two requests at least")
    return sorted(found, key=lambda row: row.at_s)


def _seconds(when: str) -> float:
    """Parse `2023-11-16 18:17:03.9799600`, whose seventh decimal `strptime` does not accept."""
    date, _, fraction = when.partition(".")
    whole = datetime.strptime(date, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    return whole + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)


def parse_windows(text: str) -> list[ClientWindow]:
    """Parse a client of ServeGen: start, rate, coefficient of variation, pattern, and two derived columns; no header.
    Raises BadTrace.
    """
    found = []
    for number, cells in enumerate(csv.reader(io.StringIO(text)), 1):
        try:
            at_s, rate, cv, pattern = float(cells[0]), float(cells[1]), float(cells[2] or 0), cells[3]
        except (ValueError, IndexError):
            raise BadTrace(f"line {number}: must be start, rate, variation and pattern of a window") from None
        if rate > 0 and pattern not in ("Gamma", "Weibull"):
            raise BadTrace(f"line {number}: {pattern!r}: must be Gamma or Weibull")
        found.append(ClientWindow(at_s, rate, cv, pattern))
    if not found:
        raise BadTrace("must have a window")
    return found


def window_at(windows: Sequence[ClientWindow], at_s: float) -> ClientWindow:
    """Return the last window that has begun by then, or the first."""
    return max((window for window in windows if window.at_s <= at_s), key=lambda each: each.at_s, default=windows[0])


def replay_rows(rows: Sequence[TraceRow], speed: float) -> list[DueRequest]:
    """Return the rows of one tenant, `speed` times as fast."""
    when = replayed([row.at_s for row in rows], speed)
    return [DueRequest(at, 0, row.prompt, row.output) for at, row in zip(when, rows, strict=True)]


def draw_by_clients(
    rows: Sequence[TraceRow], windows: Sequence[ClientWindow], requests: int, seconds: float, chance: Random
) -> list[DueRequest]:
    """Draw about `requests` requests in `seconds`. Each client's share and bursts are those of its window. Both lengths
    of a request are from one row, drawn with replacement. Raises BadTrace if all rates are 0.
    """
    whole = sum(window.rate for window in windows)
    if whole <= 0:
        raise BadTrace("no client sends requests at that time")
    scale = requests / seconds / whole
    found = []
    for tenant, window in enumerate(windows):
        for at_us in renewal(window.rate * scale, window.cv, window.pattern, seconds, chance):
            row = chance.choice(rows)
            found.append(DueRequest(at_us, tenant, row.prompt, row.output))
    return sorted(found, key=lambda due: due.at_us)


def make_prompt(due: DueRequest, number: int, shared: float) -> list[str]:
    """Return a prompt of this length. All prompts of the tenant share its first part (`shared`); the rest is unique. A
    token has about four bytes.
    """
    same = int(shared * due.prompt)
    first = [f"t{due.tenant}", *(f"s{place % 100:02}" for place in range(1, same))][:same]
    rest = due.prompt - same
    return [*first, *([f"n{number}"] if rest else []), *(f"u{place % 100:02}" for place in range(1, rest))]


@dataclass(frozen=True, slots=True)
class TracePlan(BenchPlan):
    """The load to send. With `windows`, one per client, arrivals are drawn from them, else replayed from `rows`."""

    rows: Sequence[TraceRow]
    windows: Sequence[ClientWindow]
    requests: int
    seconds: float  # duration of the clients' load
    speed: float  # speed of a replay
    shared: float  # share of each prompt that all prompts of its tenant have in common
    slots: int
    seed: int


def plan_of(file: Path, clients: Sequence[Path], at_s: float, **options: Any) -> TracePlan:
    """Return the plan with the files' content, and each client's window at `at_s`. Raises BadTrace with the file."""
    windows = [window_at(_read(client, parse_windows), at_s) for client in clients]
    return TracePlan(rows=_read(file, parse_trace), windows=windows, **options)


def _read(file: Path, parse: Callable[[str], list[T]]) -> list[T]:
    try:
        return parse(file.read_text())
    except (BadTrace, UnicodeDecodeError, csv.Error) as error:
        raise BadTrace(f"{file}: {error}") from None


def load_of(plan: TracePlan) -> list[DueRequest]:
    """Return the requests to send. Raises BadTrace."""
    if plan.windows:
        return draw_by_clients(plan.rows, plan.windows, plan.requests, plan.seconds, Random(plan.seed))  # noqa: S311 - no secret
    return replay_rows(plan.rows[: plan.requests], plan.speed)


def run(plan: TracePlan, scratch: Path) -> TraceFigures:
    """Run the bench. Raises BadTrace, InstallationFailed, ProgramFailed."""
    due = load_of(plan)
    tenants = [f"client{number}" for number in range(max(1, len(plan.windows)))]
    keys = keys_for(tenants)
    prompts = [make_prompt(each, number, plan.shared) for number, each in enumerate(due)]
    payloads = tuple(_payload(each, prompt, tenants, keys) for each, prompt in zip(due, prompts, strict=True))
    upstream = UpstreamConfig(one_model(keys, plan.slots), 0.0, PROMPT_TOKEN_S, TOKEN_S)
    with running_activator(scratch, upstream, LONG_HEAD_TIMEOUT) as door, running_open_loop(scratch) as loop:
        lasts_s = due[-1].at_us / 1e6 if due else 0.0
        plan.tell(f"{len(due)} requests of {len(tenants)} tenants in {lasts_s:.0f} s")
        arrivals = tuple((each.at_us, number) for number, each in enumerate(due))
        ran = loop.run(OpenLoopPlan(door.port, payloads, arrivals, min(256, len(due)), 2048, PATIENCE_S))
        seen = door.upstream_report(len(due))
    fit = fit_of(plan, due, prompts, ran, seen, tenants)
    return TraceFigures(fit, _outcome_of(due, ran, seen), notes=(cores_note(), NOTE))


def _payload(due: DueRequest, prompt: Sequence[str], tenants: Sequence[str], keys: dict[str, str]) -> RequestTemplate:
    who = tenants[due.tenant]
    name = MODEL if due.tenant == 0 else f"{tenants[0]}/{MODEL}"
    body = {"model": name, "prompt": " ".join(prompt), "max_tokens": due.output}
    return RequestTemplate(keys[who], "/v1/completions", json.dumps(body), who=who)


def fit_of(
    plan: TracePlan,
    due: Sequence[DueRequest],
    prompts: Sequence[Sequence[str]],
    ran: LoadResult,
    seen: UpstreamReport,
    tenants: Sequence[str],
) -> TraceFit:
    """Compare the load with the trace: with all rows if lengths were drawn from them, else with the replayed rows."""
    rows = plan.rows if plan.windows else plan.rows[: plan.requests]
    records = [record for record in seen.records if record.outcome == "ok"]
    recorded = Counter(record.tenant for record in records)
    shares = [recorded[tenant] / max(1, len(records)) for tenant in tenants]
    rates = [window.rate for window in plan.windows] or [1.0]
    wanted = [rate / sum(rates) for rate in rates]
    gaps = [_gaps(due, ran, tenant) for tenant in range(len(tenants))]
    source: list[float | None] = [window.cv for window in plan.windows]
    source = source or [trace_fit.variation([int(row.at_s * 1e6) for row in rows])]
    known = [cv if own is not None else None for cv, own in zip(source, gaps, strict=True)]
    sent_us = [sent.sent_us for sent in ran.sent if sent.sent_us is not None]
    prompt_tokens = sum(len(prompt) for prompt in prompts)
    return TraceFit(
        requests=len(due),
        prompt=trace_fit.lengths([row.prompt for row in rows], [record.prompt_tokens for record in records]),
        output=trace_fit.lengths([row.output for row in rows], [record.completion_tokens for record in records]),
        joint=FigurePair(
            trace_fit.joint([(row.prompt, row.output) for row in rows]),
            trace_fit.joint([(record.prompt_tokens, record.completion_tokens) for record in records]),
        ),
        variation=FigurePair(trace_fit.weighted_mean(known, wanted), trace_fit.weighted_mean(gaps, wanted)),
        dispersion=FigurePair(trace_fit.dispersion([each.at_us for each in due]), trace_fit.dispersion(sent_us)),
        tenants=len(tenants),
        largest=FigurePair(max(wanted), max(shares)),
        apart=trace_fit.apart(wanted, shares),
        prefix=FigurePair(plan.shared, _common(due, prompts) / max(1, prompt_tokens)),
    )


def _gaps(due: Sequence[DueRequest], ran: LoadResult, tenant: int) -> float | None:
    own = [
        sent.sent_us
        for each, sent in zip(due, ran.sent, strict=True)
        if each.tenant == tenant and sent.sent_us is not None
    ]
    return trace_fit.variation(own)


def _common(due: Sequence[DueRequest], prompts: Sequence[Sequence[str]]) -> int:
    """Return how many prompt tokens are in a prefix that an earlier prompt of the same tenant has, too."""
    longest: dict[int, list[Sequence[str]]] = {}
    found = 0
    for each, prompt in zip(due, prompts, strict=True):
        before = longest.setdefault(each.tenant, [])
        found += max((_alike(prompt, other) for other in before), default=0)
        before.append(prompt)
        before.sort(key=len, reverse=True)
        del before[2:]  # the longest prompts have the longest common prefixes
    return found


def _alike(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _outcome_of(due: Sequence[DueRequest], ran: LoadResult, seen: UpstreamReport) -> TraceOutcome:
    right = [
        sent
        for each, sent in zip(due, ran.sent, strict=True)
        if sent.is_ok and ran.text(sent) == f"{each.prompt} {each.output}"
    ]
    recorded = sum(record.outcome == "ok" for record in seen.records)
    took = [sent.took_s for sent in right]
    return TraceOutcome(
        len(right),
        len(right) - recorded,
        quantile_of(took, 0.5),
        quantile_of(took, 0.99),
        quantile_of(send_delays_s(ran.sent), 0.99),
        dict(Counter(sent.code for sent in ran.sent if not sent.is_ok)),
    )


_FILE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)
BENCH: Final = Bench(
    "trace",
    """Send the load of FILE (CSV: TIMESTAMP, ContextTokens, GeneratedTokens, as Azure publishes it). Report how close
    it came to FILE: lengths, bursts, tenants, prefixes. Exits with 1 if a claim fails.""",
    (
        click.Argument(["file"], type=_FILE),
        click.Option(
            ["--clients"],
            multiple=True,
            type=_FILE,
            help="A client's rate windows (ServeGen CSV); repeat for more tenants. [default: FILE's times, one tenant]",
        ),
        option("--at", 0.0, FiniteNumber(0), "Time in the clients' windows, in seconds.", "at_s"),
        option("--seconds", 60.0, FiniteNumber(1, 86_400), "Duration of the clients' load."),
        option("--requests", 2000, click.IntRange(2, 1_000_000), "About how many requests to send."),
        option("--speed", 20.0, FiniteNumber(0.01, 10_000), "Replay FILE this many times as fast."),
        option("--shared-prefix", 0.0, FiniteNumber(0, 1), "Share of a prompt that its tenant's share.", "shared"),
        option("--slots", 64, click.IntRange(1, 1024), "Slots of the replica."),
        option("--seed", 1, int, "Seed of the random load."),
    ),
    plan_of,
    run,
    trace_fit.table,
    trace_fit.judge,
)
