"""What `kelvin bench front` measured: rates and waits through the front door, beside its upstream and others. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from coldstart_bench.failures import Failed
from coldstart_bench.statistics import median_of
from coldstart_bench.verdicts import Verdict, line_of

UPSTREAM, NGINX, KELVIN, RAY, LITELLM = "upstream alone", "nginx", "kelvin", "Ray Serve", "LiteLLM"
SYSTEMS: Final = (UPSTREAM, NGINX, KELVIN, RAY, LITELLM)


class Take(msgspec.Struct, frozen=True):
    """A few seconds of load: requests that were answered, how long it took, and what their wait was."""

    requests: int
    us: int
    p50_us: int
    p99_us: int
    bad: int  # connections and answers that were not as they should be
    processor_us: int | None = None  # of the process in front, where it is ours

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.requests / self.us * 1e6


class FrontRow(msgspec.Struct, frozen=True):
    """One system at so many connections: medians of the rounds; what is beside another is of each round."""

    connections: int
    system: str
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    n: int
    bad: int
    added_p50_ms: float | None  # over the upstream alone
    ratio_to_nginx: float | None  # of rates
    kelvin_ratio: float | None  # our rate to this one's
    processor_us: float | None  # a request


class Streams(msgspec.Struct, frozen=True):
    """Streams that are read while they are said."""

    streams: int
    tokens_per_s: float  # of each, as the upstream says them
    seconds: float
    tokens: int  # that came
    core_share: float  # of the process in front

    @property
    def came(self) -> float:
        """The part of what was said in that time."""
        return self.tokens / (self.streams * self.tokens_per_s * self.seconds)


class FrontReport(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    rows: tuple[FrontRow, ...]
    streams: Streams
    unrecorded: int  # answers without a usage record
    loader: str
    failures: tuple[Failed, ...]
    verdicts: tuple[Verdict, ...]
    machine: dict[str, object]
    load_before: float
    commit: str | None
    notes: tuple[str, ...] = ()


Taken = Mapping[tuple[int, str], Sequence[Take]]  # (connections, system) -> one of each round


def rows_of(taken: Taken) -> tuple[FrontRow, ...]:
    """In order of connections, systems as they are listed."""
    places = sorted(taken, key=lambda place: (place[0], SYSTEMS.index(place[1])))
    return tuple(_row(taken, *place) for place in places if taken[place])


def _row(taken: Taken, connections: int, system: str) -> FrontRow:
    own = taken[connections, system]
    alone, nginx, ours = (taken.get((connections, each), ()) for each in (UPSTREAM, NGINX, KELVIN))
    added = [(mine.p50_us - other.p50_us) / 1000 for mine, other in zip(own, alone, strict=False)]
    beside = [mine.rate / other.rate for mine, other in zip(own, nginx, strict=False) if other.requests]
    kelvin = [our.rate / mine.rate for mine, our in zip(own, ours, strict=False) if mine.requests]
    spent = [take.processor_us / take.requests for take in own if take.processor_us is not None and take.requests]
    return FrontRow(
        connections,
        system,
        median_of([take.rate for take in own]).median,
        median_of([take.p50_us / 1000 for take in own]).median,
        median_of([take.p99_us / 1000 for take in own]).median,
        len(own),
        sum(take.bad for take in own),
        _median(added) if system != UPSTREAM else None,
        _median(beside) if system != NGINX else None,
        _median(kelvin) if system != KELVIN else None,
        _median(spent),
    )


def _median(values: Sequence[float]) -> float | None:
    return median_of(values).median if values else None


def table(report: FrontReport) -> str:
    """Return the report as the text that a person reads."""
    head = f"{'conns':>5}  {'system':<14} {'requests/s':>10} {'p50':>9} {'p99':>9} {'added':>9}"
    lines = [f"load: {report.loader}", f"{head} {'/ nginx':>8} {'kelvin /':>8} {'cpu':>7}"]
    for row in report.rows:
        added = "" if row.added_p50_ms is None else f"{row.added_p50_ms:.3f}ms"
        beside = "" if row.ratio_to_nginx is None else f"{row.ratio_to_nginx:.3f}x"
        kelvin = "" if row.kelvin_ratio is None else f"{row.kelvin_ratio:.2f}x"
        spent = "" if row.processor_us is None else f"{row.processor_us:.0f}us"
        lines.append(
            f"{row.connections:>5}  {row.system:<14} {row.requests_per_s:>10.0f}"
            f" {row.p50_ms:>7.3f}ms {row.p99_ms:>7.3f}ms {added:>9} {beside:>8} {kelvin:>8} {spent:>7}"
        )
    streams = report.streams
    lines.append(
        f"{streams.streams} streams of {streams.tokens_per_s:g} tokens/s: {streams.core_share:.3f} of a core, "
        f"{streams.came:.3f} of their tokens came"
    )
    lines += [f"{failed.system}: not measured: {failed.reason}" for failed in report.failures]
    return "\n".join([*lines, *(line_of(verdict) for verdict in report.verdicts)])
