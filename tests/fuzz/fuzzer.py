"""Feed a parser of ours with mutations of what it takes, keep those that lead somewhere new, judge every answer.

A parser may answer in two ways: with a value, which holds what its target says of values, or with the refusal that it
names. Anything else is a finding: another exception, a refusal that can't be told, too much time, too much memory.
"""

import math
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from types import FrameType
from typing import Any, Final

from contracts.errors import Failure, Refused
from contracts.problem import problem_details
from tests.fuzz.coverage import Coverage
from tests.fuzz.mutate import MAX_BYTES, Mutation, mutate_bytes

CPU_S: Final = 5.0  # for one input of at most MAX_BYTES: a parser of ours needs milliseconds
MEMORY_BYTES: Final = 512 << 20  # that one input may ask for
SAYS_CHARACTERS: Final = 4096  # of a refusal: what was sent is not sent back
POOL: Final = 4096
SHRINKS: Final = 300

Refusal = type[Failure] | type[Exception]


@dataclass(frozen=True)
class Target:
    """A parser, what it may raise (exactly these types), and what holds of its values.

    `again` is the encoder: what it makes of a value decodes to an equal one. `holds` raises AssertionError.
    """

    name: str
    parse: Callable[[bytes], Any]
    refusals: tuple[Refusal, ...]
    samples: tuple[bytes, ...]
    mutate: Mutation = mutate_bytes
    again: Callable[[Any], bytes] | None = None
    holds: Callable[[bytes, Any], None] | None = None


@dataclass(frozen=True)
class Finding:
    """An input, and what is wrong with the answer to it."""

    data: bytes
    fault: str


@dataclass(frozen=True)
class Report:
    """How long was looked, and what was found."""

    executions: int
    steps: int
    finding: Finding | None
    pool: tuple[bytes, ...]


class _TookTooLong(BaseException):
    """No handler of a parser may swallow it."""


def judge(target: Target, data: bytes) -> tuple[str, str | None]:
    """What it was refused with ("" where it was not), and what is wrong, if anything is."""
    try:
        value = target.parse(data)
        if target.holds is not None:
            target.holds(data, value)
        if target.again is not None and target.parse(target.again(value)) != value:
            return "", "what its encoder makes of the value decodes to another one"
    except _TookTooLong:
        return "", f"it took more than {CPU_S:g} s"
    except MemoryError:
        return "", f"it asked for more than {MEMORY_BYTES >> 20} MiB"
    except BaseException as error:
        return _judge_refusal(target, error)
    return "", None


def _judge_refusal(target: Target, error: BaseException) -> tuple[str, str | None]:
    said = f"{type(error).__name__}: {error}"
    kind = type(error.failure) if isinstance(error, Refused) else type(error)
    if kind not in target.refusals:
        return said, f"it raised {kind.__name__}: {str(error)[:300]}"
    told = len(said)
    if isinstance(error, Refused):
        try:
            told = len(problem_details(error.failure))
        except Exception as fault:
            return said, f"its refusal can't be told: {fault!r}"
    return said, f"its refusal has {told} characters" if told > SAYS_CHARACTERS else None


@contextmanager
def bounded() -> Iterator[Callable[[], None]]:
    """Bounds on memory for the block, and on the processor's time since the last call of what it yields."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    timed = threading.current_thread() is threading.main_thread()  # others get no signals

    def took_too_long(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    def begin() -> None:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)

    before = signal.signal(signal.SIGVTALRM, took_too_long) if timed else None
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, hard))
    try:
        yield begin
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)


def fuzz(
    target: Target, corpus: Sequence[bytes] = (), *, seed: int, seconds: float = math.inf, executions: float = math.inf
) -> Report:
    """Until the first finding, or a bound. The same seed makes the same inputs, in the same order."""
    random, coverage = Random(seed), Coverage()
    pool = list(dict.fromkeys([*target.samples, *corpus]))
    waiting, until, count = list(pool), time.monotonic() + seconds, 0
    with bounded() as begin:
        while count < executions and time.monotonic() < until:
            # A right input is changed as often as all that it led to together: most of those are refused early.
            parent = random.choice(pool if random.random() < 0.5 else target.samples)
            data = waiting.pop(0) if waiting else target.mutate(random, parent, pool)[:MAX_BYTES]
            begin()
            is_new, fault = _try(target, coverage, data)
            count += 1
            if fault is not None:
                return Report(count, len(coverage), shrunk(target, Finding(data, fault), begin), tuple(pool))
            if is_new and data not in pool:
                pool.append(data)
                if len(pool) > POOL:
                    pool.pop(random.randrange(len(pool)))
    return Report(count, len(coverage), None, tuple(pool))


def _try(target: Target, coverage: Coverage, data: bytes) -> tuple[bool, str | None]:
    faults: list[str | None] = []

    def call() -> str:
        said, fault = judge(target, data)
        faults.append(fault)
        return said

    return coverage.is_new(call), faults[0]


def shrunk(target: Target, finding: Finding, begin: Callable[[], None]) -> Finding:
    """The same fault with fewer bytes: halves, quarters, and so on are left out while it stays."""
    data, size, left = finding.data, max(1, len(finding.data) // 2), SHRINKS
    while size and left:
        at = 0
        while at < len(data) and left:
            shorter = data[:at] + data[at + size :]
            left -= 1
            begin()
            if judge(target, shorter)[1] == finding.fault:
                data = shorter
            else:
                at += size
        size //= 2
    return Finding(data, finding.fault)
