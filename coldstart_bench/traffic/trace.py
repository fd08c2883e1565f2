"""`kelvin bench trace`: a published trace as a load, and how close what was sent came to it."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import click

from coldstart_bench.frame import Bench, BenchPlan, option
from coldstart_bench.statistics import quantile_of
from coldstart_bench.traffic import trace_fit
from coldstart_bench.traffic.behind import MODEL, PATIENT, Behind, Seen, cores_note, keys_for, looping, standing
from coldstart_bench.traffic.exchange import Payload, Plan, Ran, lags_s
from coldstart_bench.traffic.trace_fit import Came, Fit, Pair, TraceFigures
from coldstart_bench.traffic.trace_source import (
    BadTrace,
    Due,
    Row,
    Window,
    as_recorded,
    by_clients,
    rows_of,
    window_at,
    windows_of,
    words,
)
from service.arguments import Number

T = TypeVar("T")

PROMPT_TOKEN_S: Final = 5e-5  # 20,000 prompt tokens a second
TOKEN_S: Final = 0.01
PATIENCE_S: Final = 120.0
NOTE: Final = "what was sent is what the activator recorded, but for prefixes, which are of the prompts themselves"


@dataclass(frozen=True, slots=True)
class TracePlan(BenchPlan):
    """The load to send. With `windows`, one for each client, arrivals are theirs, else those of `rows`."""

    rows: Sequence[Row]
    windows: Sequence[Window]
    requests: int
    seconds: float  # in which clients send them
    speed: float  # at which rows are replayed
    shared: float  # part of each prompt that its tenant's prompts begin with
    slots: int
    seed: int


def plan_of(file: Path, clients: Sequence[Path], at_s: float, **options: Any) -> TracePlan:
    """With what the files say; each client's window is that of `at_s`. Raises BadTrace naming the file."""
    windows = [window_at(_read(client, windows_of), at_s) for client in clients]
    return TracePlan(rows=_read(file, rows_of), windows=windows, **options)


def _read(file: Path, parse: Callable[[str], list[T]]) -> list[T]:
    try:
        return parse(file.read_text())
    except (BadTrace, UnicodeDecodeError) as error:
        raise BadTrace(f"{file}: {error}") from None


def load_of(plan: TracePlan) -> list[Due]:
    """Return the requests to send. Raises BadTrace."""
    if plan.windows:
        return by_clients(plan.rows, plan.windows, plan.requests, plan.seconds, Random(plan.seed))  # noqa: S311 - a load, no secret
    return as_recorded(plan.rows[: plan.requests], plan.speed)


def run(plan: TracePlan, scratch: Path) -> TraceFigures:
    """Raises BadTrace, InstallationFailed, PeerFailed."""
    due = load_of(plan)
    tenants = [f"client{number}" for number in range(max(1, len(plan.windows)))]
    keys = keys_for(tenants)
    prompts = [words(each, number, plan.shared) for number, each in enumerate(due)]
    payloads = tuple(_payload(each, prompt, tenants, keys) for each, prompt in zip(due, prompts, strict=True))
    behind = Behind(keys, plan.slots, 0.0, PROMPT_TOKEN_S, TOKEN_S)
    with standing(scratch, behind, PATIENT) as door, looping(scratch) as loop:
        lasts_s = due[-1].at_us / 1e6 if due else 0.0
        plan.tell(f"{len(due)} requests of {len(tenants)} tenants in {lasts_s:.0f} s")
        arrivals = tuple((each.at_us, number) for number, each in enumerate(due))
        ran = loop.run(Plan(door.port, payloads, arrivals, min(256, len(due)), 2048, PATIENCE_S))
        seen = door.seen(len(due))
    fit = fit_of(plan, due, prompts, ran, seen, tenants)
    return TraceFigures(fit, _came(due, ran, seen), notes=(cores_note(), NOTE))


def _payload(due: Due, prompt: Sequence[str], tenants: Sequence[str], keys: dict[str, str]) -> Payload:
    who = tenants[due.tenant]
    name = MODEL if due.tenant == 0 else f"{tenants[0]}/{MODEL}"
    body = {"model": name, "prompt": " ".join(prompt), "max_tokens": due.output}
    return Payload(keys[who], "/v1/completions", json.dumps(body), who=who)


def fit_of(
    plan: TracePlan, due: Sequence[Due], prompts: Sequence[Sequence[str]], ran: Ran, seen: Seen, tenants: Sequence[str]
) -> Fit:
    """Beside the trace: all its rows where lengths are drawn from them, those that were replayed otherwise."""
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
    return Fit(
        requests=len(due),
        prompt=trace_fit.lengths([row.prompt for row in rows], [record.prompt_tokens for record in records]),
        output=trace_fit.lengths([row.output for row in rows], [record.completion_tokens for record in records]),
        joint=Pair(
            trace_fit.joint([(row.prompt, row.output) for row in rows]),
            trace_fit.joint([(record.prompt_tokens, record.completion_tokens) for record in records]),
        ),
        variation=Pair(trace_fit.weighted(known, wanted), trace_fit.weighted(gaps, wanted)),
        dispersion=Pair(trace_fit.dispersion([each.at_us for each in due]), trace_fit.dispersion(sent_us)),
        tenants=len(tenants),
        largest=Pair(max(wanted), max(shares)),
        apart=trace_fit.apart(wanted, shares),
        prefix=Pair(plan.shared, _common(due, prompts) / max(1, prompt_tokens)),
    )


def _gaps(due: Sequence[Due], ran: Ran, tenant: int) -> float | None:
    own = [
        sent.sent_us
        for each, sent in zip(due, ran.sent, strict=True)
        if each.tenant == tenant and sent.sent_us is not None
    ]
    return trace_fit.variation(own)


def _common(due: Sequence[Due], prompts: Sequence[Sequence[str]]) -> int:
    """Tokens that a prompt has in common with the longest beginning that two of its tenant's prompts share with it."""
    longest: dict[int, list[Sequence[str]]] = {}
    found = 0
    for each, prompt in zip(due, prompts, strict=True):
        before = longest.setdefault(each.tenant, [])
        found += max((_alike(prompt, other) for other in before), default=0)
        before.append(prompt)
        before.sort(key=len, reverse=True)
        del before[2:]  # the longest ones have the most to share
    return found


def _alike(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _came(due: Sequence[Due], ran: Ran, seen: Seen) -> Came:
    right = [
        sent
        for each, sent in zip(due, ran.sent, strict=True)
        if sent.is_ok and ran.text(sent) == f"{each.prompt} {each.output}"
    ]
    recorded = sum(record.outcome == "ok" for record in seen.records)
    took = [sent.took_s for sent in right]
    return Came(
        len(right),
        len(right) - recorded,
        quantile_of(took, 0.5),
        quantile_of(took, 0.99),
        quantile_of(lags_s(ran.sent), 0.99),
        dict(Counter(sent.code for sent in ran.sent if not sent.is_ok)),
    )


_FILE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)
BENCH: Final = Bench(
    "trace",
    """Send what FILE says (TIMESTAMP, ContextTokens, GeneratedTokens, as Azure has it) and print how close it came to
    that: lengths, bursts, tenants, prefixes. Exit 1 where a line does not hold.""",
    (
        click.Argument(["file"], type=_FILE),
        click.Option(
            ["--clients"],
            multiple=True,
            type=_FILE,
            help="A client's windows of rates, as ServeGen has them; each is a tenant. "
            "[default: FILE's own times, one tenant]",
        ),
        option("--at", 0.0, Number(0), "Second of the clients' windows.", "at_s"),
        option("--seconds", 60.0, Number(1, 86_400), "Of the clients."),
        option("--requests", 2000, click.IntRange(2, 1_000_000), "About so many."),
        option("--speed", 20.0, Number(0.01, 10_000), "Of FILE's own times."),
        option("--shared-prefix", 0.0, Number(0, 1), "Of a prompt; FILE has none.", "shared"),
        option("--slots", 64, click.IntRange(1, 1024), "Of the replica."),
        option("--seed", 1, int, "Of what is drawn."),
    ),
    plan_of,
    run,
    trace_fit.table,
    trace_fit.judge,
)
