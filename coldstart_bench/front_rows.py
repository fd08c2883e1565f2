"""What `kelvin bench front` measured: rates and waits through the front door, beside its upstream and others. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from coldstart_bench.report import Figures, Verdict, align, at_least, at_most, cell
from coldstart_bench.statistics import median_of

UPSTREAM, NGINX, KELVIN, RAY, LITELLM = "upstream alone", "nginx", "kelvin", "Ray Serve", "LiteLLM"
SYSTEMS: Final = (UPSTREAM, NGINX, KELVIN, RAY, LITELLM)
ADDED_MS: Final = 1.0
OF_NGINX: Final = 0.10
OF_RAY: Final = 8.0
OF_LITELLM: Final = 25.0
RATE: Final = 3000.0
CORE_SHARE: Final = 0.25
CAME: Final = 0.98


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


class FrontFigures(Figures, frozen=True):
    """Figures of all systems that are installed."""

    rows: tuple[FrontRow, ...]
    streams: Streams
    unrecorded: int  # answers without a usage record
    loader: str


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


def judge(found: FrontFigures) -> tuple[Verdict, ...]:
    """Whether all was answered and recorded decides; the state is the number of connections."""
    ours = {row.connections: row for row in found.rows if row.system == KELVIN}
    one, some = ours.get(1), ours.get(16)
    added = None if one is None else one.added_p50_ms
    beside = None if some is None else some.ratio_to_nginx
    rate = None if some is None else some.requests_per_s
    over = {row.system: row.kelvin_ratio for row in found.rows if row.connections == 16}
    streams, state = found.streams, str(found.streams.streams)
    bad = sum(row.bad for row in found.rows)
    silent = sum(row.requests_per_s == 0 for row in found.rows) + (not streams.tokens)
    return (
        at_most("milliseconds added to the median", added, ADDED_MS, "1", decides=False),
        at_least("rate to that of nginx as a TLS proxy", beside, OF_NGINX, "16", decides=False),
        at_least("rate to that of Ray Serve", over.get(RAY), OF_RAY, "16", decides=False),
        at_least("rate to that of LiteLLM", over.get(LITELLM), OF_LITELLM, "16", decides=False),
        at_least("requests a second through one core", rate, RATE, "16", decides=False),
        at_most("share of a core for streams", streams.core_share, CORE_SHARE, state, decides=False),
        at_least("share of their tokens that came", streams.came, CAME, state, decides=False),
        at_most("loads and streams without any answer", silent, 0),
        at_most("requests that were not answered right", bad, 0),
        at_most("answers without a usage record", found.unrecorded, 0),
    )


def table(found: FrontFigures) -> str:
    """Return the figures as the text that a person reads."""
    rows = [("conns", "system", "requests/s", "p50", "p99", "added", "/ nginx", "kelvin /", "cpu")]
    for row in found.rows:
        beside = (
            cell(row.added_p50_ms, "{:.3f}ms", none=""),
            cell(row.ratio_to_nginx, "{:.3f}x", none=""),
            cell(row.kelvin_ratio, "{:.2f}x", none=""),
            cell(row.processor_us, "{:.0f}us", none=""),
        )
        waits = f"{row.requests_per_s:.0f}", f"{row.p50_ms:.3f}ms", f"{row.p99_ms:.3f}ms"
        rows.append((str(row.connections), row.system, *waits, *beside))
    streams = found.streams
    read = (
        f"{streams.streams} streams of {streams.tokens_per_s:g} tokens/s: {streams.core_share:.3f} of a core, "
        f"{streams.came:.3f} of their tokens came"
    )
    return "\n".join([f"load: {found.loader}", *align(rows, left=2), read])
