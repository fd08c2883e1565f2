"""Choose the rows that share the next forward of an encoder or predictor, and how long to wait for more rows.

The cost of a forward is its tokens, padding included; a predictor's row counts as one. Waiting is worthwhile if sharing
saves more time than the wait takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

CPU_TOKENS: Final = 2048
CUDA_TOKENS: Final = 16384
MAX_WAIT_S: Final = 0.005  # small, since a request itself takes milliseconds
FIRST_WAIT_S: Final = 0.0005
SLOW_FORWARD_S: Final = 2.0  # a tenth of the default KELVIN_STEP_S, after which a forward counts as hanging
_SMOOTHING: Final = 0.2


def choose_rows(queues: Sequence[Sequence[int]], max_tokens: int) -> tuple[int, ...]:
    """Return how many sequences of each request go into the next forward.

    `queues` has the lengths of the waiting sequences of each request, in round-robin order. Take one of each request
    per round, until rows times the longest row would exceed `max_tokens`. The first sequence is taken whatever its
    length. The caller moves requests that had rows to the end of the order. Then a long request delays no other.
    """
    counts = [0] * len(queues)
    rows = longest = 0
    for round_index in range(max(map(len, queues), default=0)):
        for index, lengths in enumerate(queues):
            if round_index >= len(lengths):
                continue
            if rows and (rows + 1) * max(longest, lengths[round_index]) > max_tokens:
                return tuple(counts)
            rows, longest = rows + 1, max(longest, lengths[round_index])
            counts[index] += 1
    return tuple(counts)


def next_row_limit(rows: int, elapsed_s: float, row_limit: int, max_rows: int) -> int:
    """Return the row limit of the next forward, if this one had `rows` of at most `row_limit` rows. It doubles after a
    full and quick forward, and shrinks after one longer than SLOW_FORWARD_S. Only forwards show what a row costs.
    """
    if elapsed_s > SLOW_FORWARD_S:
        return max(1, int(rows * SLOW_FORWARD_S / elapsed_s))
    return min(max_rows, 2 * row_limit) if rows >= row_limit and elapsed_s < SLOW_FORWARD_S / 4 else row_limit


@dataclass(frozen=True, slots=True)
class BatchObservation:
    """One forward: its requests, how many of them arrived while the first waited, and the times."""

    requests: int
    joined: int
    waited_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class BatchingWindow:
    """How long the first request of a batch waits for others. `single_request_s` is the cost of a request that runs
    alone.
    """

    wait_s: float = 0.0
    single_request_s: float | None = None
    cap_s: float = MAX_WAIT_S

    def next_window(self, batch: BatchObservation) -> "BatchingWindow":
        """Return the next window: doubled, up to the cap, if sharing paid off; otherwise halved, down to 0."""
        if batch.requests == 1:
            cost_s = batch.compute_s if self.single_request_s is None else self.single_request_s
            single_request_s = cost_s + _SMOOTHING * (batch.compute_s - cost_s)
            return replace(self, wait_s=_halved(self.wait_s), single_request_s=single_request_s)
        if self._did_pay_off(batch):
            return replace(self, wait_s=min(self.cap_s, max(FIRST_WAIT_S, 2 * self.wait_s)))
        return replace(self, wait_s=_halved(self.wait_s))

    def _did_pay_off(self, batch: BatchObservation) -> bool:
        """Return whether sharing saved more time than the first request lost. Without a window, requests that shared a
        forward by chance are the evidence.
        """
        if self.single_request_s is None:
            return False
        sharing = batch.joined if self.wait_s else batch.requests - 1
        saved_s = (batch.requests * self.single_request_s - batch.compute_s) * sharing / batch.requests
        return saved_s > batch.waited_s


def _halved(wait_s: float) -> float:
    return wait_s / 2 if wait_s / 2 >= FIRST_WAIT_S else 0.0
