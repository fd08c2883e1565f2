"""What a storm came to: did each range leave the store once, did all finish when a fair line would have it. Pure."""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from coldstart_bench.report import Figures, Verdict, at_most, ratio
from coldstart_bench.statistics import median_of

ONCE: Final = 1.01  # a hedged range may be asked for twice
ABOUT_ONCE: Final = 1.10
UNFAIR: Final = 0.20


class Waiters(msgspec.Struct, frozen=True):
    """Many requests for one model at zero."""

    asked: int
    answered: int
    wrong: int
    leases: int
    chunk_reads: int
    chunks: int
    first_s: float
    median_s: float
    last_s: float


class Node(msgspec.Struct, frozen=True):
    """One agent: bytes of packs that left the store for it, and how many of them it had not had before."""

    sent_bytes: int
    distinct_bytes: int


class Miss(msgspec.Struct, frozen=True):
    """Many models missing at once, at each of the agents: seconds until each lease, by agent."""

    models: int
    model_bytes: int
    line_bytes_s: float
    finished_s: tuple[tuple[float, ...], ...]
    failures: tuple[str, ...]
    nodes: tuple[Node, ...]
    store: Node  # what left it in all


class StormFigures(Figures, frozen=True):
    """Figures of both parts."""

    waiters: Waiters
    miss: Miss  # each agent for itself
    peered: Miss  # the same, of agents that are one another's peers


def fair_finishes(sizes: Sequence[int], rate: float) -> tuple[float, ...]:
    """When each would be through, were the line shared equally among all that are not: processor sharing."""
    order, finishes, at, done = sorted(range(len(sizes)), key=sizes.__getitem__), [0.0] * len(sizes), 0.0, 0
    for place, number in enumerate(order):
        at += (sizes[number] - done) * (len(sizes) - place) / rate
        done = sizes[number]
        finishes[number] = at
    return tuple(finishes)


def unfairness(finished_s: Sequence[float], sizes: Sequence[int]) -> float:
    """The largest distance from the fair finish, as a part of it; the line's rate is all bytes by the last finish."""
    rate = sum(sizes) / max(finished_s)
    fair = fair_finishes(sizes, rate)
    return max(abs(was - should) / should for was, should in zip(finished_s, fair, strict=True))


def judge(found: StormFigures) -> tuple[Verdict, ...]:
    """Whether all was answered decides; "at most" says nothing where nothing was read."""
    waiters, miss = found.waiters, found.miss
    size = miss.model_bytes
    # A node that read nothing is the worst of all: then the line is not measured.
    worst = max((_times(node) for node in miss.nodes), key=lambda times: times or math.inf, default=None)
    in_all = _times(found.peered.store)
    failed = len(miss.failures) + len(found.peered.failures)
    fair = [unfairness(each, [size] * len(each)) for each in miss.finished_s if each and not miss.failures]
    reads = ratio(waiters.chunk_reads or None, waiters.chunks or None)
    wrong = waiters.asked - waiters.answered + waiters.wrong
    return (
        at_most("requests that were not answered right", wrong, 0),
        at_most("leases for all who waited", waiters.leases or None, 1, decides=False),
        at_most("reads of a chunk", reads, 1, decides=False),
        at_most("leases that failed", failed, 0, "", size),
        at_most("times that a byte left the store, per node", worst, ONCE, "", size, decides=False),
        at_most("times that a byte left the store in all, with peers", in_all, ABOUT_ONCE, "", size, decides=False),
        at_most("largest distance from a fair finish", max(fair, default=None), UNFAIR, "", size, decides=False),
    )


def _times(node: Node) -> float | None:
    """That a byte left the store; None where none did."""
    return node.sent_bytes / node.distinct_bytes if node.sent_bytes and node.distinct_bytes else None


def table(found: StormFigures) -> str:
    """Return the figures as the text that a person reads."""
    waiters = found.waiters
    lines = [
        f"{waiters.asked} waited for one model at zero: {waiters.answered} answered, {waiters.wrong} of them wrong; "
        f"{waiters.leases} leases, {waiters.chunk_reads} reads of {waiters.chunks} chunks",
        f"  answered after {waiters.first_s:.2f} s for the first, {waiters.median_s:.2f} s at the median, "
        f"{waiters.last_s:.2f} s for the last",
        *_lines(found.miss, "each for itself"),
        *_lines(found.peered, "peers of one another"),
    ]
    return "\n".join(lines)


def _lines(miss: Miss, how: str) -> list[str]:
    lines = [
        f"{miss.models} models of {miss.model_bytes / 1e6:.0f} MB missing at once at {len(miss.nodes)} agents, {how}, "
        f"over a line of {miss.line_bytes_s / 1e6:.0f} MB/s: {miss.store.sent_bytes / 1e6:.1f} MB left the store, "
        f"{miss.store.distinct_bytes / 1e6:.1f} MB of them for the first time"
    ]
    for number, (node, ends) in enumerate(zip(miss.nodes, miss.finished_s, strict=True)):
        when = f"{min(ends):.2f} to {max(ends):.2f} s, median {median_of(ends).median:.2f} s" if ends else "never"
        again = node.sent_bytes - node.distinct_bytes
        lines.append(
            f"  agent {number}: leased after {when}; {node.sent_bytes / 1e6:.1f} MB left the store for it, "
            f"{again / 1e6:.2f} MB of them again"
        )
    return [*lines, *(f"  {failure}" for failure in miss.failures[:3])]
