"""`kelvin bench soak`: an installation under load while processes die, clients stall and the clock is stepped."""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import eq
from pathlib import Path
from random import Random
from typing import Any, Final

from coldstart_bench.endings import Bounds, Totals, differences, totals_of
from coldstart_bench.frame import Bench, BenchPlan, option
from coldstart_bench.installation import Installation, InstallationFailed, running
from coldstart_bench.leftovers import ended, stray_sockets, unfinished
from coldstart_bench.patience import remaining
from coldstart_bench.peers import make_model
from coldstart_bench.room import LEAST_BYTES
from coldstart_bench.stepped_clock import SteppedClock
from coldstart_bench.traffic.arrivals import poisson
from coldstart_bench.traffic.behind import Loop, looping
from coldstart_bench.traffic.exchange import Payload, Plan, Ran, Reader
from coldstart_bench.traffic.family import pid_of
from coldstart_bench.traffic.faults import AWAY, WHOLE_S, Faults, redis_for, run_to_end
from coldstart_bench.traffic.memory import Sample, memory_of, try_sample
from coldstart_bench.traffic.soak_rows import Event, SoakFigures, bounds_for, figures_of, judge, table, wrong_with
from service.arguments import Number

MODEL: Final = "soak"
TENANT: Final = "default"
STALL_S: Final = 3
SHORT, LONG = 12, 120  # tokens
# Each with its share of the requests, in percent.
MIX: Final = ((Reader.QUICK, SHORT, 80), (Reader.QUICK, LONG, 8), (Reader.SLOW, SHORT, 8), (Reader.SILENT, LONG, 4))
SETTLED_S: Final = 60.0
PATIENCE_S: Final = 60.0
NO_REDIS_NOTE: Final = "redis-server is not installed: it was not killed, and limits were not shared"


@dataclass(frozen=True, slots=True)
class SoakPlan(BenchPlan):
    """How long, how much, how often something is done to it."""

    seconds: float
    rate: float  # requests a second
    every_s: float  # a fault
    seed: int


def run(plan: SoakPlan, scratch: Path) -> SoakFigures:
    """Raises InstallationFailed, PeerFailed."""
    data, clock = scratch / "data", SteppedClock(scratch / "clock")
    plan.tell("making and pushing a model")
    make_model(scratch / "model", LEAST_BYTES // 2, 1, sharp=True)
    settings = {**clock.settings, "KELVIN_STALL_S": str(STALL_S), "KELVIN_CHUNK_BYTES": str(1 << 20)}
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(redis_for(scratch))
        settings |= {} if redis is None else {"KELVIN_REDIS": redis.url}
        loop = stack.enter_context(looping(scratch))
        with running(data, settings=settings) as kelvin:
            kelvin.push(scratch / "model", MODEL)
            kelvin.admin.request("PUT", f"/admin/v1/models/{MODEL}/scale", {"max": 1})
            payloads = _payloads(kelvin)
            right = baseline_of(_alone(loop, kelvin, payloads))
            before = _settled(kelvin)
            samples = _sampled(kelvin)
            faults = Faults(kelvin, MODEL, redis, clock)
            ran, events = _under_fire(plan, kelvin, loop, payloads, faults)
            clock.step(0)
            faults.whole_after(time.monotonic())
            after = _alone(loop, kelvin, payloads)  # an installation that refuses all from then on refuses rightly
            quick = [_quick(each) for each in payloads]
            bounds = sum((_bounds(ran, number, payloads) for number in range(len(ran.sent))), Bounds())
            bounds += sum((_bounds(after, number, quick) for number in range(len(after.sent))), Bounds())
            _differences(kelvin, before, bounds)  # until all is told, or it takes too long
            samples += _sampled(kelvin)
            bill = _closing(kelvin)
            bill += _differences(kelvin, before, bounds)  # what replicas wrote at their end is in it, too
            left = unfinished(data) + stray_sockets(data)
        left += ended(data)
    wrong = [
        f"request {number} ({payloads[sent.payload].reader}): {why}"
        for number, sent in enumerate(ran.sent)
        if (why := wrong_with(sent, ran.text(sent), right[sent.payload], payloads[sent.payload].reader)) is not None
    ]
    return figures_of(
        plan.seconds,
        ran.sent,
        wrong=tuple(wrong),
        events=tuple(events),
        bill=tuple(bill),
        left=tuple(left),
        memory=memory_of(samples),
        again=sum(map(eq, _texts(after), right)) / len(right),
        notes=() if redis is not None else (NO_REDIS_NOTE,),
    )


def _payloads(kelvin: Installation) -> tuple[Payload, ...]:
    key, found = (kelvin.data / "default.key").read_text().strip(), []
    for number, (reader, tokens, _) in enumerate(MIX):
        prompt = " ".join(f"w{10 * number + place}" for place in range(4))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        found.append(Payload(key, "/v1/completions", json.dumps(body), reader=reader))
    return tuple(found)


def _quick(payload: Payload) -> Payload:
    """Return the payload with a client that reads at once."""
    return Payload(payload.key, payload.path, payload.body)


def _alone(loop: Loop, kelvin: Installation, payloads: Sequence[Payload]) -> Ran:
    """Each asked by itself, by who reads."""
    arrivals = tuple((0, number) for number in range(len(payloads)))
    return loop.run(Plan(kelvin.port, tuple(map(_quick, payloads)), arrivals, 0, 1, PATIENCE_S))


def baseline_of(ran: Ran) -> list[str]:
    """What each is answered while nothing is done to it. Raises InstallationFailed where one is not answered."""
    texts = _texts(ran)
    if lacking := [text for sent, text in zip(ran.sent, texts, strict=True) if not sent.is_ok or not text]:
        raise InstallationFailed(f"before the first fault, {len(lacking)} of {len(texts)} had no answer: {lacking[0]}")
    return texts


def _texts(ran: Ran) -> list[str]:
    """What each was answered."""
    return [ran.text(sent) if sent.is_ok else f"not answered: {sent.code}" for sent in ran.sent]


def _under_fire(
    plan: SoakPlan, kelvin: Installation, loop: Loop, payloads: Sequence[Payload], faults: Faults
) -> tuple[Ran, list[Event]]:
    chance = Random(plan.seed)  # noqa: S311 - a load, no secret
    when = poisson(plan.rate, plan.seconds, chance)
    whose = chance.choices(range(len(MIX)), [share for _, _, share in MIX], k=len(when))
    asked = Plan(kelvin.port, tuple(payloads), tuple(zip(when, whose, strict=True)), 4, 512, PATIENCE_S)
    plan.tell(f"{len(when)} requests in {plan.seconds:g} s, a fault each {plan.every_s:g} s (seed {plan.seed})")
    with ThreadPoolExecutor(1, "load") as pool:
        load = pool.submit(loop.run, asked)
        events = faults.run(plan.every_s, time.monotonic() + plan.seconds)
        return load.result(), events


def _bounds(ran: Ran, number: int, payloads: Sequence[Payload]) -> Bounds:
    sent = ran.sent[number]
    limit = int(json.loads(payloads[sent.payload].body)["max_tokens"])
    return bounds_for(sent, ran.text(sent), limit, payloads[sent.payload].reader)


def _bill(kelvin: Installation) -> Any:
    month = time.strftime("%Y-%m", time.gmtime())
    return kelvin.admin.request("GET", f"/admin/v1/billing/report?month={month}")


def _settled(kelvin: Installation) -> Totals:
    """What is on the bill once what was asked so far is."""
    kelvin.wait(lambda: totals_of(_bill(kelvin)).requests >= len(MIX), "what was asked is on the bill")
    return totals_of(_bill(kelvin))


def _differences(kelvin: Installation, before: Totals, bounds: Bounds) -> list[str]:
    """Once it has had time to hear of everything."""

    def wrong() -> list[str]:
        try:
            return differences(before, totals_of(_bill(kelvin)), bounds)
        except AWAY as away:
            return [f"the bill can't be asked for: {away}"]

    return remaining(wrong, SETTLED_S)


def _closing(kelvin: Installation) -> list[str]:
    """What the commands find that check bill, ledger and store, once nothing runs."""
    kelvin.to_zero(MODEL)
    kelvin.wait(lambda: not _bill(kelvin)["open_runtimes"], "every life is recorded", WHOLE_S)
    found = []
    for words in (["billing", "report"], ["billing", "verify"], ["fsck"]):
        command = [sys.executable, "-m", "kelvin.main", *words, "--data", str(kelvin.data)]
        why = remaining(partial(run_to_end, command), SETTLED_S)  # what a replica wrote at its end comes by itself
        found += [] if why is None else [f"kelvin {' '.join(words)} {why}"]
    return found


def _sampled(kelvin: Installation) -> list[Sample]:
    """Of the activator, at rest."""
    sample = try_sample(pid_of(kelvin.pid, "activator"))
    return [] if sample is None else [sample]


BENCH: Final = Bench(
    "soak",
    """An installation under load whose processes are killed in turn, whose clients stall and whose clock is stepped:
    how each request ended, and whether the bill agrees. Exit 1 where a line does not hold.""",
    (
        option("--seconds", 600.0, Number(5, 604_800), "Of load."),
        option("--rate", 10.0, Number(0.1, 1000), "Requests a second."),
        option("--every", 10.0, Number(1, 3600), "Seconds to a fault.", "every_s"),
        option("--seed", 1, int, "Of what is drawn."),
    ),
    SoakPlan,
    run,
    table,
    judge,
)
