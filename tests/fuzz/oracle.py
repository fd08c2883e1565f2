"""Judge how a parser answers the inputs that hypothesis makes.

A parser may return a value that passes the target's checks, or refuse with one of the target's refusals. Anything else
is a finding: another exception, a refusal that can't be rendered, too much time, too much memory.
"""

import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Flaky

from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.problem import problem_details
from tests.fuzz.mutations import Change, change_bytes, changed_sample

CPU_S: Final = 5.0  # for one input of at most MAX_BYTES; our parsers need milliseconds
MEMORY_BYTES: Final = 512 << 20  # that one input may allocate
SAYS_CHARACTERS: Final = 4096  # of a refusal's text: a refusal must not repeat the input

Refusal = type[Failure] | type[Exception]


@dataclass(frozen=True)
class FuzzTarget:
    """A parser, the exact types that it may raise, and the checks of its values.

    `again` is the encoder: its result must decode to an equal value. `holds` raises AssertionError.
    """

    name: str
    parse: Callable[[bytes], Any]
    refusals: tuple[Refusal, ...]
    samples: tuple[bytes, ...]
    change: Change = change_bytes
    again: Callable[[Any], bytes] | None = None
    holds: Callable[[bytes, Any], None] | None = None


@dataclass(frozen=True)
class FuzzFinding:
    """An input, and what is wrong with the answer to it."""

    data: bytes
    fault: str


class _TookTooLong(BaseException):
    """A time limit that no `except Exception` of a parser swallows."""


def find(target: FuzzTarget, corpus: Sequence[bytes], *, seed: int, inputs: int) -> FuzzFinding | None:
    """Return the finding with the fewest changes among `inputs` changed inputs. Samples and corpus are judged first.

    The same seed makes the same inputs, as long as the same modules are imported.
    """
    findings: list[FuzzFinding] = []

    @seeded(seed)
    @settings(
        max_examples=inputs,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(changed_sample(target.change, target.samples, corpus))
    def answers_rightly(data: bytes) -> None:
        if (fault := judge(target, data)) is not None:
            findings.append(FuzzFinding(data, fault))
            raise AssertionError(fault)

    for data in (*target.samples, *corpus):
        answers_rightly = example(data)(answers_rightly)
    try:
        answers_rightly()
    except (AssertionError, Flaky):
        return findings[-1]
    return None


def judge(target: FuzzTarget, data: bytes) -> str | None:
    """Return the fault of the answer to an input, or None."""
    try:
        with _bounded():
            value = target.parse(data)
            if target.holds is not None:
                target.holds(data, value)
            if target.again is not None and target.parse(target.again(value)) != value:
                return "its encoder's result decodes to another value"
    except _TookTooLong:
        return f"it took more than {CPU_S:g} s"
    except MemoryError:
        return f"it asked for more than {MEMORY_BYTES >> 20} MiB"
    except BaseException as error:
        return _judge_refusal(target, error)
    return None


def _judge_refusal(target: FuzzTarget, error: BaseException) -> str | None:
    kind = type(error.failure) if isinstance(error, Refused) else type(error)
    if kind not in target.refusals:
        return f"it raised {kind.__name__}: {str(error)[:300]}"
    try:
        length = len(
            problem_details(error.failure) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        )
    except Exception as fault:
        return f"its refusal can't be rendered: {fault!r}"
    return f"its refusal has {length} characters" if length > SAYS_CHARACTERS else None


@contextmanager
def _bounded() -> Iterator[None]:
    """Bound the memory and CPU time of the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    timed = threading.current_thread() is threading.main_thread()  # other threads get no signals

    def took_too_long(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGVTALRM, took_too_long) if timed else None
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, hard))
    try:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
