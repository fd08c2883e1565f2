"""Which sequences or rows share the next forward of an encoder or predictor, and how long to wait for more of them.

Tokens are what a forward costs, padding included; a predictor's row counts as one. Waiting pays where sharing saved
more time than it took.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

CPU_TOKENS: Final = 2048
CUDA_TOKENS: Final = 16384
MAX_WAIT_S: Final = 0.005  # beside a request's own milliseconds
FIRST_WAIT_S: Final = 0.0005
SLOW_FORWARD_S: Final = 2.0  # a tenth of KELVIN_STEP_S by default: a longer forward counts as one that hangs
_SMOOTHING: Final = 0.2


def choose_rows(queues: Sequence[Sequence[int]], max_tokens: int) -> tuple[int, ...]:
    """Return how many sequences of each request go into the next forward. `queues` has the lengths of the waiting ones,
    in order of turns.

    Take one of each request in turn, again and again, until rows times the longest row would exceed `max_tokens`. The
    first sequence is taken whatever its length. A request of many sequences delays no other if requests that had rows
    in one forward come last in the next.
    """
    taken = [0] * len(queues)
    rows = longest = 0
    for turn in range(max(map(len, queues), default=0)):
        for index, lengths in enumerate(queues):
            if turn >= len(lengths):
                continue
            if rows and (rows + 1) * max(longest, lengths[turn]) > max_tokens:
                return tuple(taken)
            rows, longest = rows + 1, max(longest, lengths[turn])
            taken[index] += 1
    return tuple(taken)


def next_row_limit(rows: int, took_s: float, rows_max: int, limit: int) -> int:
    """Return how many rows the next forward may have, if this one had `rows` of at most `rows_max`: twice as many if it
    was full and quick, fewer if it took longer than SLOW_FORWARD_S. What a row costs is known from forwards alone.
    """
    if took_s > SLOW_FORWARD_S:
        return max(1, int(rows * SLOW_FORWARD_S / took_s))
    return min(limit, 2 * rows_max) if rows >= rows_max and took_s < SLOW_FORWARD_S / 4 else rows_max


@dataclass(frozen=True, slots=True)
class BatchObservation:
    """What one forward was: its requests, those among them that came while the first waited, and the times."""

    requests: int
    joined: int
    waited_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class BatchingWindow:
    """How long the first request of a batch waits for others. `single_request_s` is what a request costs that
    shares nothing.
    """

    wait_s: float = 0.0
    single_request_s: float | None = None
    cap_s: float = MAX_WAIT_S

    def next_window(self, batch: BatchObservation) -> "BatchingWindow":
        """The window for the next batch: doubled, to its cap at most, where sharing paid; else halved, down to none."""
        if batch.requests == 1:
            known = batch.compute_s if self.single_request_s is None else self.single_request_s
            single_request_s = known + _SMOOTHING * (batch.compute_s - known)
            return replace(self, wait_s=_halved(self.wait_s), single_request_s=single_request_s)
        if self._did_pay_off(batch):
            return replace(self, wait_s=min(self.cap_s, max(FIRST_WAIT_S, 2 * self.wait_s)))
        return replace(self, wait_s=_halved(self.wait_s))

    def _did_pay_off(self, batch: BatchObservation) -> bool:
        """Whether those who joined saved more than the first lost. Without a window yet, those who shared anyway are
        the evidence."""
        if self.single_request_s is None:
            return False
        sharing = batch.joined if self.wait_s else batch.requests - 1
        saved_s = (batch.requests * self.single_request_s - batch.compute_s) * sharing / batch.requests
        return saved_s > batch.waited_s


def _halved(wait_s: float) -> float:
    return wait_s / 2 if wait_s / 2 >= FIRST_WAIT_S else 0.0
