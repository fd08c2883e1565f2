"""`kelvin bench front`: what the front door costs a request, beside its upstream alone, nginx as a TLS proxy, others.

One activator, as it is run, between a lean program that stands for control plane and replica, and a loader. TLS, key,
durable record and timeline are on. The activator has a core to itself, nginx has it when it is its turn; the loader and
what is behind share another one. Systems are measured in turn within each round.
"""

import json
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import click
import msgspec

from coldstart_bench import front_tools
from coldstart_bench.certificates import make_certificate
from coldstart_bench.frame import Bench, BenchPlan, option
from coldstart_bench.front_rows import KELVIN, NGINX, UPSTREAM, FrontFigures, Streams, Take, judge, rows_of, table
from coldstart_bench.installation import free_port
from coldstart_bench.patience import remaining
from coldstart_bench.processes import processor_us
from coldstart_bench.programs import PeerFailed, Program
from coldstart_bench.report import Failed
from coldstart_bench.services import activator

Loader = Literal["wrk", "own"]

STREAMS: Final = 64
TOKENS_PER_S: Final = 50.0
READY_S: Final = 60.0
RECORDED_S: Final = 20.0
WARM_S: Final = 1
MOST: Final = 512
_PATH: Final = "/v1/chat/completions"
_MESSAGES: Final = [{"role": "user", "content": "hi"}]
CORES_NOTE: Final = "the loader and what is behind share one core, whoever is in front has another one"
ONE_CORE_NOTE: Final = "one core for all: rates say nothing"


@dataclass(frozen=True, slots=True)
class FrontPlan(BenchPlan):
    """Options of `kelvin bench front`."""

    connections: Sequence[int]
    rounds: int
    seconds: int  # of each load
    loader: Loader
    peers: bool  # those, too, that `make bench-peers` installed


def connections_of(words: str) -> tuple[int, ...]:
    """Numbers separated by commas. Raises ValueError naming what is none."""
    found = [int(word) if word.strip().isdigit() else 0 for word in words.split(",")]
    if not all(1 <= number <= MOST for number in found):
        raise ValueError(f"{words}: must be numbers of 1 to {MOST} separated by commas")
    return tuple(sorted(set(found)))


def run(plan: FrontPlan, scratch: Path) -> FrontFigures:
    """Raises InstallationFailed, PeerFailed."""
    wrk = front_tools.try_find("wrk") if plan.loader == "wrk" else None
    if plan.loader == "wrk" and wrk is None:
        raise PeerFailed("wrk is not installed: `make bench-tools`, or `--loader own`")
    with ExitStack() as stack:
        return _Run(plan, wrk, scratch, stack).figures()


class _Run:
    """Everything that is under way, until the stack unwinds."""

    def __init__(self, plan: FrontPlan, wrk: str | None, scratch: Path, stack: ExitStack) -> None:
        self._plan = plan
        self._scratch = scratch
        self._key = f"kv-benchbenchbe-{secrets.token_hex(21)}"
        cores = sorted(os.sched_getaffinity(0))
        self._front, self._rest = cores[0], cores[-1]
        data = scratch / "data"
        (data / "run").mkdir(parents=True, mode=0o700)
        with front_tools.on_core(self._rest):
            self._upstream = stack.enter_context(Program("front_upstream", str(data), self._key, str(TOKENS_PER_S)))
            self._own = stack.enter_context(Program("front_load"))
        alone: int = self._upstream.ask()["port"]
        self._urls = {UPSTREAM: f"http://127.0.0.1:{alone}{_PATH}"}
        self._keys: dict[str, str] = {}  # of who takes another one than ours
        self._wrk = wrk
        self._absent: list[Failed] = []
        with front_tools.on_core(self._front):
            if (binary := front_tools.try_find("nginx")) is not None:
                port = free_port()
                stack.enter_context(front_tools.nginx(binary, scratch / "nginx", port, alone))
                self._urls[NGINX] = f"https://localhost:{port}{_PATH}"
            else:
                self._absent.append(Failed(NGINX, "not installed (make bench-tools)"))
            port = free_port()
            self._pid = stack.enter_context(activator(data, port))
            self._urls[KELVIN] = f"https://localhost:{port}{_PATH}"
            for system in front_tools.PEERS if plan.peers else ():
                self._put_in_front(system, alone, stack)

    def _put_in_front(self, system: str, upstream: int, stack: ExitStack) -> None:
        """A peer, where it is installed."""
        if (program := front_tools.try_find_peer(system)) is None:
            self._absent.append(Failed(system, "not installed (make bench-peers)"))
            return
        chain, private = make_certificate(self._scratch / f"{system} certificate")
        place = front_tools.Place(
            self._scratch / system, free_port(), _PATH, upstream, chain, private, front_tools.new_key()
        )
        stack.enter_context(front_tools.peer(system, program, place))
        self._keys[system] = place.key
        self._urls[system] = f"https://localhost:{place.port}{_PATH}"

    def figures(self) -> FrontFigures:
        plan, taken = self._plan, defaultdict[tuple[int, str], list[Take]](list)
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
            "wrk" if self._wrk is not None else "a loop of our own",
            failures=tuple(self._absent),
            notes=(CORES_NOTE if self._front != self._rest else ONE_CORE_NOTE,),
        )

    def _take(self, system: str, connections: int, seconds: int) -> Take:
        body, url = json.dumps({"model": "m", "messages": _MESSAGES}), self._urls[system]
        key = self._keys.get(system, self._key)
        before_us = processor_us(self._pid)
        if self._wrk is not None:
            with front_tools.on_core(self._rest):
                take = front_tools.wrk(self._wrk, self._scratch, url, connections, seconds, body, key)
        else:
            said = self._own.ask(do="load", url=url, connections=connections, seconds=seconds, body=body, key=key)
            take = front_tools.take_of(said)
        if system != KELVIN:
            return take
        return msgspec.structs.replace(take, processor_us=processor_us(self._pid) - before_us)

    def _unrecorded(self) -> int:
        """Of the answers that the activator was given, whether a client stayed for them or not. The last
        records are given time.
        """

        def missing() -> int:
            said = self._upstream.ask()
            return max(0, int(said["asked"]) - int(said["recorded"]))

        return remaining(missing, RECORDED_S)

    def _streams(self) -> Streams:
        """Handshakes are before the time that counts, and the ends of the streams after it."""
        seconds = 3 * self._plan.seconds
        self._plan.tell(f"{STREAMS} streams for {seconds} s")
        body = {
            "model": "m",
            "messages": _MESSAGES,
            "stream": True,
            "max_tokens": int((seconds + READY_S) * TOKENS_PER_S),
        }
        self._own.ask(do="open", url=self._urls[KELVIN], streams=STREAMS, body=json.dumps(body), key=self._key)
        before_us, began = processor_us(self._pid), time.perf_counter()
        tokens = self._own.ask(do="read", seconds=seconds)["tokens"]
        spent_us, took_s = processor_us(self._pid) - before_us, time.perf_counter() - began
        self._own.ask(do="close")
        return Streams(STREAMS, TOKENS_PER_S, took_s, tokens, spent_us / 1e6 / took_s)


BENCH: Final = Bench(
    "front",
    """What the front door adds to a request, beside its upstream alone, nginx as a TLS proxy, Ray Serve and LiteLLM;
    and what streams cost.

    wrk and nginx: as installed, or `make bench-tools`; Ray Serve and LiteLLM: `make bench-peers`. Who is not installed
    is not measured.
    """,
    (
        option("--connections", "1,16,64", str, "At once, separated by commas.", convert=connections_of),
        option("--rounds", 3, click.IntRange(1, 1000), "Of all systems in turn."),
        option("--seconds", 5, click.IntRange(1, 3600), "Of each load."),
        option("--loader", "wrk", click.Choice(["wrk", "own"]), "Who asks."),
        click.Option(["--peers/--no-peers"], default=True, show_default=True, help="Ray Serve and LiteLLM, too."),
    ),
    FrontPlan,
    run,
    table,
    judge,
)
