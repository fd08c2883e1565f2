"""`kelvin bench front`: time what the front door adds to a request, next to its upstream alone, nginx and others.

One activator in its usual configuration (TLS, API key, durable record, timeline) is between a load generator and a
small program that plays control plane and replica. The activator has a core to itself; nginx uses that core when it is
measured. The load generator and the upstream share another core. Systems are measured in turn within each round.
"""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import click
import msgspec

from coldstart_bench.harness import front_tools
from coldstart_bench.harness.activator_testbed import (
    MODEL,
    UpstreamConfig,
    cores,
    keys_for,
    one_model,
    running_activator,
)
from coldstart_bench.harness.front_tools import LITELLM, RAY, LoadSample
from coldstart_bench.harness.installation import free_port
from coldstart_bench.harness.polling import remaining
from coldstart_bench.harness.process_stats import processor_us
from coldstart_bench.harness.program_runner import ANSWER_S, Program, ProgramFailed
from coldstart_bench.harness.temporary_certificates import make_certificate
from coldstart_bench.report.bench_report import ClaimVerdict, Figures, MissingFigure, align, at_least, at_most, cell
from coldstart_bench.report.order_statistics import median_of
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option

UPSTREAM, NGINX, KELVIN = "upstream alone", "nginx", "kelvin"
SYSTEMS: Final = (UPSTREAM, NGINX, KELVIN, RAY, LITELLM)
ADDED_MS: Final = 1.0
OF_NGINX: Final = 0.10
OF_RAY: Final = 8.0
OF_LITELLM: Final = 25.0
RATE: Final = 3000.0
CORE_SHARE: Final = 0.25
MIN_RECEIVED_SHARE: Final = 0.98
Loader = Literal["wrk", "own"]

SLOTS: Final = 1024  # slots of the replica: more than there are connections
STREAMS: Final = 64
STREAM_TIMES: Final = 3  # streams are read for this many times the seconds of a load
TOKENS_PER_S: Final = 50.0
READY_S: Final = 60.0
RECORDED_S: Final = 20.0
WARM_S: Final = 1
MOST: Final = 512
_PATH: Final = "/v1/chat/completions"
_MESSAGES: Final = [{"role": "user", "content": "hi"}]
CORES_NOTE: Final = "the load generator and the upstream share one core, the measured system has another one"
ONE_CORE_NOTE: Final = "all processes share one core: the rates are meaningless"


class FrontRow(msgspec.Struct, frozen=True):
    """One system at one number of connections. Values are medians of rounds; ratios are of values of the same round."""

    connections: int
    system: str
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    n: int
    bad: int
    added_p50_ms: float | None  # compared with the upstream alone
    ratio_to_nginx: float | None  # ratio of rates
    kelvin_ratio: float | None  # Kelvin's rate divided by this system's
    processor_us: float | None  # CPU time per request


class StreamFigures(msgspec.Struct, frozen=True):
    """Figures of streams that are read as they are sent."""

    streams: int
    tokens_per_s: float  # rate of each stream at the upstream
    seconds: float
    tokens: int  # tokens that arrived
    core_share: float  # CPU share of the activator

    @property
    def came(self) -> float:
        """Share of the sent tokens that arrived."""
        return self.tokens / (self.streams * self.tokens_per_s * self.seconds)


class FrontFigures(Figures, frozen=True):
    """Figures of all systems that are installed."""

    rows: tuple[FrontRow, ...]
    streams: StreamFigures
    unrecorded: int  # answers without a usage record
    loader: str


Taken = Mapping[tuple[int, str], Sequence[LoadSample]]  # (connections, system) -> a sample per round


def rows_of(taken: Taken) -> tuple[FrontRow, ...]:
    """Return rows by connections, then in the order of SYSTEMS."""
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


def judge(figures: FrontFigures) -> tuple[ClaimVerdict, ...]:
    """Judge the figures. Only complete answers and records decide. The state is the number of connections."""
    ours = {row.connections: row for row in figures.rows if row.system == KELVIN}
    one, some = ours.get(1), ours.get(16)
    added = None if one is None else one.added_p50_ms
    beside = None if some is None else some.ratio_to_nginx
    rate = None if some is None else some.requests_per_s
    over = {row.system: row.kelvin_ratio for row in figures.rows if row.connections == 16}
    streams, state = figures.streams, str(figures.streams.streams)
    bad = sum(row.bad for row in figures.rows)
    silent = sum(row.requests_per_s == 0 for row in figures.rows) + (not streams.tokens)
    return (
        at_most("milliseconds added to the median", added, ADDED_MS, "1", decides=False),
        at_least("rate to that of nginx as a TLS proxy", beside, OF_NGINX, "16", decides=False),
        at_least("rate to that of Ray Serve", over.get(RAY), OF_RAY, "16", decides=False),
        at_least("rate to that of LiteLLM", over.get(LITELLM), OF_LITELLM, "16", decides=False),
        at_least("requests a second through one core", rate, RATE, "16", decides=False),
        at_most("share of a core for streams", streams.core_share, CORE_SHARE, state, decides=False),
        at_least("share of their tokens that came", streams.came, MIN_RECEIVED_SHARE, state, decides=False),
        at_most("loads and streams without any answer", silent, 0),
        at_most("requests that were not answered right", bad, 0),
        at_most("answers without a usage record", figures.unrecorded, 0),
    )


def table(figures: FrontFigures) -> str:
    """Return the figures as an aligned table."""
    rows = [("conns", "system", "requests/s", "p50", "p99", "added", "/ nginx", "kelvin /", "cpu")]
    for row in figures.rows:
        beside = (
            cell(row.added_p50_ms, "{:.3f}ms", none=""),
            cell(row.ratio_to_nginx, "{:.3f}x", none=""),
            cell(row.kelvin_ratio, "{:.2f}x", none=""),
            cell(row.processor_us, "{:.0f}us", none=""),
        )
        waits = f"{row.requests_per_s:.0f}", f"{row.p50_ms:.3f}ms", f"{row.p99_ms:.3f}ms"
        rows.append((str(row.connections), row.system, *waits, *beside))
    streams = figures.streams
    read = (
        f"{streams.streams} streams of {streams.tokens_per_s:g} tokens/s: {streams.core_share:.3f} of a core, "
        f"{streams.came:.3f} of their tokens came"
    )
    return "\n".join([f"load: {figures.loader}", *align(rows, left=2), read])


@dataclass(frozen=True, slots=True)
class FrontPlan(BenchPlan):
    """Options of `kelvin bench front`."""

    connections: Sequence[int]
    rounds: int
    seconds: int  # duration of each load
    loader: Loader
    peers: bool  # also measure the peers that `make bench-peers` installed


def connections_of(words: str) -> tuple[int, ...]:
    """Parse numbers separated by commas. Raises ValueError with the wrong text."""
    found = [int(word) if word.strip().isdigit() else 0 for word in words.split(",")]
    if not all(1 <= number <= MOST for number in found):
        raise ValueError(f"{words}: must be numbers of 1 to {MOST} separated by commas")
    return tuple(sorted(set(found)))


def run(plan: FrontPlan, scratch: Path) -> FrontFigures:
    """Run the bench. Raises InstallationFailed, ProgramFailed."""
    wrk = front_tools.try_find("wrk") if plan.loader == "wrk" else None
    if plan.loader == "wrk" and wrk is None:
        raise ProgramFailed("wrk is not installed: `make bench-tools`, or `--loader own`")
    with ExitStack() as stack:
        return _FrontRun(plan, wrk, scratch, stack).figures()


class _FrontRun:
    """All running processes of one run, until the exit stack unwinds."""

    def __init__(self, plan: FrontPlan, wrk: str | None, scratch: Path, stack: ExitStack) -> None:
        self._plan = plan
        self._scratch = scratch
        self._front, self._rest = cores()
        keys = keys_for((KELVIN,))
        self._key = keys[KELVIN]
        upstream = UpstreamConfig(one_model(keys, SLOTS), token_s=1 / TOKENS_PER_S, keeps_records=False)
        door = stack.enter_context(running_activator(scratch, upstream))
        self._pid, self._upstream = door.pid, door.upstream
        with front_tools.on_core(self._rest):
            own = Program("closed_loop", answer_s=ANSWER_S + STREAM_TIMES * plan.seconds)
            self._own = stack.enter_context(own)
        alone: int = self._upstream.call()["port"]
        self._urls = {UPSTREAM: f"http://127.0.0.1:{alone}{_PATH}"}
        self._keys: dict[str, str] = {}  # API keys of peers that need another one
        self._wrk = wrk
        self._absent: list[MissingFigure] = []
        with front_tools.on_core(self._front):
            if (binary := front_tools.try_find("nginx")) is not None:
                port = free_port()
                stack.enter_context(front_tools.nginx(binary, scratch / "nginx", port, alone))
                self._urls[NGINX] = f"https://localhost:{port}{_PATH}"
            else:
                self._absent.append(MissingFigure(NGINX, "not installed (make bench-tools)"))
            self._urls[KELVIN] = f"https://localhost:{door.port}{_PATH}"
            for system in front_tools.PEERS if plan.peers else ():
                self._put_in_front(system, alone, stack)

    def _put_in_front(self, system: str, upstream: int, stack: ExitStack) -> None:
        """Start a peer, if it is installed."""
        if (program := front_tools.try_find_peer(system)) is None:
            self._absent.append(MissingFigure(system, "not installed (make bench-peers)"))
            return
        chain, private = make_certificate(self._scratch / f"{system} certificate")
        place = front_tools.PeerConfig(
            self._scratch / system, free_port(), _PATH, upstream, chain, private, front_tools.new_key()
        )
        stack.enter_context(front_tools.running_peer(system, program, place))
        self._keys[system] = place.key
        self._urls[system] = f"https://localhost:{place.port}{_PATH}"

    def figures(self) -> FrontFigures:
        plan, taken = self._plan, defaultdict[tuple[int, str], list[LoadSample]](list)
        for system in self._urls:
            self._take(system, 4, WARM_S)
        for number in range(plan.rounds):
            for connections in plan.connections:
                order = list(self._urls)
                for system in order[number % len(order) :] + order[: number % len(order)]:
                    take = self._take(system, connections, plan.seconds)
                    taken[connections, system].append(take)
                    plan.tell(f"{system}, {connections}: {take.rate:.0f} requests/s")
        unrecorded = self._unrecorded()
        return FrontFigures(
            rows_of(taken),
            self._streams(),
            unrecorded,
            "wrk" if self._wrk is not None else "the bench's own loop",
            failures=tuple(self._absent),
            notes=(CORES_NOTE if self._front != self._rest else ONE_CORE_NOTE,),
        )

    def _take(self, system: str, connections: int, seconds: int) -> LoadSample:
        body, url = json.dumps({"model": MODEL, "messages": _MESSAGES}), self._urls[system]
        key = self._keys.get(system, self._key)
        before_us = self._processor_us()
        if self._wrk is not None:
            with front_tools.on_core(self._rest):
                take = front_tools.wrk(self._wrk, self._scratch, url, connections, seconds, body, key)
        else:
            answer = self._own.call(do="load", url=url, connections=connections, seconds=seconds, body=body, key=key)
            take = front_tools.parse_sample(answer)
        if system != KELVIN:
            return take
        return msgspec.structs.replace(take, processor_us=self._processor_us() - before_us)

    def _processor_us(self) -> int:
        """Return the activator's CPU time. Raises ProgramFailed if it has ended."""
        try:
            return processor_us(self._pid)
        except OSError as error:
            raise ProgramFailed("the activator has ended") from error

    def _unrecorded(self) -> int:
        """Return how many answers of the activator have no record, once late ones had time to arrive. A record without
        an answer is allowed: its client left before the request was sent on.
        """
        return remaining(lambda: int(self._upstream.call()["unrecorded"]), RECORDED_S)

    def _streams(self) -> StreamFigures:
        """Measure streams. Handshakes and the ends of streams are outside of the measured time."""
        seconds = STREAM_TIMES * self._plan.seconds
        self._plan.tell(f"{STREAMS} streams for {seconds} s")
        body = {
            "model": MODEL,
            "messages": _MESSAGES,
            "stream": True,
            "max_tokens": int((seconds + READY_S) * TOKENS_PER_S),
        }
        self._own.call(do="open", url=self._urls[KELVIN], streams=STREAMS, body=json.dumps(body), key=self._key)
        before_us, began = self._processor_us(), time.perf_counter()
        tokens = self._own.call(do="read", seconds=seconds)["tokens"]
        spent_us, took_s = self._processor_us() - before_us, time.perf_counter() - began
        self._own.call(do="close")
        return StreamFigures(STREAMS, TOKENS_PER_S, took_s, tokens, spent_us / 1e6 / took_s)


BENCH: Final = Bench(
    "front",
    """Time what the front door adds to a request, next to its upstream alone, nginx, Ray Serve and LiteLLM; and
    measure the cost of streams.

    To install wrk and nginx, run `make bench-tools`; for Ray Serve and LiteLLM, `make bench-peers`. Systems that are
    not installed are skipped.
    """,
    (
        option("--connections", "1,16,64", str, "Connections at once, separated by commas.", convert=connections_of),
        option("--rounds", 3, click.IntRange(1, 1000), "Rounds of all systems in turn."),
        option("--seconds", 5, click.IntRange(1, 3600), "Duration of each load."),
        option("--loader", "wrk", click.Choice(["wrk", "own"]), "Load generator."),
        click.Option(["--peers/--no-peers"], default=True, show_default=True, help="Measure Ray Serve and LiteLLM."),
    ),
    FrontPlan,
    run,
    table,
    judge,
)
