"""Compare the load that the activator recorded with the trace behind it, and report the outcome. Pure."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, pstdev, pvariance
from typing import Final

import msgspec

from coldstart_bench.report.bench_report import ClaimVerdict, Figures, align, at_most, cell, recorded_once
from coldstart_bench.report.order_statistics import quantile_of

DISTANCE: Final = 0.05
VARIATION: Final = 0.25  # relative to the gaps' variation: a hundred heavy-tailed gaps allow no tighter limit
DISPERSION: Final = 0.05
PREFIX: Final = 0.02
PARTS: Final = (0.5, 0.9, 0.99, 1.0)
FEW: Final = 50  # with fewer gaps, a tenant's variation is meaningless


class FigurePair(msgspec.Struct, frozen=True):
    """A figure of the trace (`asked`) and of the sent load. None if there is too little data."""

    asked: float | None
    sent: float | None


class Lengths(msgspec.Struct, frozen=True):
    """Token counts of prompts or outputs: quantiles at `PARTS`, and the distance between both distributions."""

    asked: tuple[float | None, ...]
    sent: tuple[float | None, ...]
    distance: float  # Kolmogorov-Smirnov distance


class TraceFit(msgspec.Struct, frozen=True):
    """How close a load was to its trace."""

    requests: int
    prompt: Lengths
    output: Lengths
    joint: FigurePair  # rank correlation of prompt and output lengths
    # Coefficient of variation of gaps between a tenant's requests, weighted by the tenants' shares.
    variation: FigurePair
    dispersion: FigurePair  # variance to mean of requests per second, as due and as sent
    tenants: int
    largest: FigurePair  # share of the largest tenant
    apart: float  # total variation distance between the tenants' shares
    prefix: FigurePair  # share of prompt tokens that are in a prefix shared with the tenant's other prompts


class TraceOutcome(msgspec.Struct, frozen=True):
    """Results of the requests. Times are measured from when each was due."""

    right: int
    unrecorded: int  # answers minus usage records; negative if there are more records
    p50_s: float | None
    p99_s: float | None
    lag_p99_s: float | None  # delay of the open loop itself
    codes: dict[str, int]  # error code to count of requests that were not answered


class TraceFigures(Figures, frozen=True):
    """The fit of the load, and the results of its requests."""

    fit: TraceFit
    came: TraceOutcome


def lengths(asked: Sequence[int], sent: Sequence[int]) -> Lengths:
    """Compare lengths of the trace with recorded lengths."""
    return Lengths(
        tuple(quantile_of(asked, part) for part in PARTS),
        tuple(quantile_of(sent, part) for part in PARTS),
        distance(asked, sent),
    )


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the largest difference of two empirical distributions (Kolmogorov-Smirnov). 1 if one is empty."""
    if not one or not other:
        return 1.0
    a, b = sorted(one), sorted(other)
    return max(abs(bisect_right(a, at) / len(a) - bisect_right(b, at) / len(b)) for at in {*a, *b})


def joint(pairs: Sequence[tuple[int, int]]) -> float | None:
    """Return Spearman's rank correlation; equal values get their mean rank. None if there is nothing to compare."""
    if len(pairs) < 2:
        return None
    one, other = _ranks([pair[0] for pair in pairs]), _ranks([pair[1] for pair in pairs])
    spread = pstdev(one) * pstdev(other)
    mean = fmean(one) * fmean(other)
    return (fmean(a * b for a, b in zip(one, other, strict=True)) - mean) / spread if spread else None


def _ranks(values: Sequence[int]) -> list[float]:
    counts = Counter(values)
    rank: dict[int, float] = {}
    before = 0
    for value in sorted(counts):
        rank[value] = before + (counts[value] + 1) / 2
        before += counts[value]
    return [rank[value] for value in values]


def variation(at_us: Sequence[int]) -> float | None:
    """Return the coefficient of variation of the gaps, or None below FEW gaps."""
    gaps = [after - before for before, after in pairwise(sorted(at_us))]
    return pstdev(gaps) / fmean(gaps) if len(gaps) >= FEW and max(gaps) else None


def dispersion(at_us: Sequence[int]) -> float | None:
    """Return variance to mean of requests per second, from first to last second. It is 1 for a Poisson process."""
    seconds = [at // 1_000_000 for at in at_us]
    if not seconds or max(seconds) - min(seconds) < 2:
        return None
    counts = Counter(seconds)
    series = [counts[each] for each in range(min(seconds), max(seconds) + 1)]
    return pvariance(series) / fmean(series)


def apart(asked: Sequence[float], sent: Sequence[float]) -> float:
    """Return the total variation distance of two lists of shares."""
    return sum(abs(a - b) for a, b in zip(asked, sent, strict=True)) / 2


def weighted_mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted mean of the known values, or None."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    whole = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / whole if whole else None


def judge(figures: TraceFigures) -> tuple[ClaimVerdict, ...]:
    """Judge the figures. The state of each claim is the number of requests. With few requests a distance has more
    noise. The limit then is the one that 99 of 100 samples of that size keep.
    """
    fit, came = figures.fit, figures.came
    state, n = str(fit.requests), max(1, fit.requests)
    limit = max(DISTANCE, 1.63 / math.sqrt(n))
    skew = max(DISTANCE, math.sqrt(fit.tenants / n))
    prefix = max(PREFIX, 2 * fit.tenants / n)  # a tenant's first prompt shares no prefix
    return (
        at_most("distance of prompts' lengths from the trace's", fit.prompt.distance, limit, state),
        at_most("distance of outputs' lengths from the trace's", fit.output.distance, limit, state),
        at_most("difference of the lengths' rank correlation", _off(fit.joint), 2 * limit, state),
        at_most("gaps' variation, off the trace's by", _relative(fit.variation), VARIATION, state),
        at_most("requests a second, dispersion off by", _relative(fit.dispersion), DISPERSION, state),
        at_most("distance of tenants' shares from the trace's", fit.apart, skew, state),
        at_most("difference of the share of shared prefixes", _off(fit.prefix), prefix, state),
        at_most("requests that were not answered right", fit.requests - came.right, 0, state),
        *recorded_once(came.unrecorded, state),
    )


def _off(pair: FigurePair) -> float | None:
    return None if pair.asked is None or pair.sent is None else abs(pair.asked - pair.sent)


def _relative(pair: FigurePair) -> float | None:
    return None if not pair.asked or pair.sent is None else abs(pair.sent / pair.asked - 1)


def table(figures: TraceFigures) -> str:
    """Return the figures as an aligned table."""
    fit, came = figures.fit, figures.came
    p50, p99, lag = (cell(each, "{:.1f} ms", times=1e3) for each in (came.p50_s, came.p99_s, came.lag_p99_s))
    head = (
        f"{fit.requests} requests of {fit.tenants} tenants: {came.right} answered right; "
        f"{p50} at the median, {p99} p99, from when each was due; sent within {lag} (p99)"
    )
    rows = [("", "trace", "sent")]
    for name, lengths_of in (("prompt tokens", fit.prompt), ("output tokens", fit.output)):
        for part, asked, sent in zip(("p50", "p90", "p99", "most"), lengths_of.asked, lengths_of.sent, strict=True):
            rows.append((f"{name}, {part}", _number(asked), _number(sent)))
    for name, pair in (
        ("rank correlation of both", fit.joint),
        ("variation of gaps", fit.variation),
        ("dispersion of requests a second", fit.dispersion),
        ("share of the largest tenant", fit.largest),
        ("share of shared prefixes", fit.prefix),
    ):
        rows.append((name, _number(pair.asked), _number(pair.sent)))
    codes = [f"not answered: {code} {count}" for code, count in sorted(came.codes.items())]
    return "\n".join([head, *align(rows), *codes])


def _number(value: float | None) -> str:
    return cell(value, "{:g}" if value is None or value == int(value) else "{:.3f}")
