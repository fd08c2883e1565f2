"""The engine of models whose requests are rows that share forwards: queue, batches, costs, and the known answers.

Implements `interface.Engine`, so encoders and predictors share thread, streams, metering and delivery with decoders. A
subclass defines a row and computes it. `batching_policy.py` chooses the rows of a step and how long to wait for more.
Single-threaded.
"""

import logging
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Generic, TypeVar

import torch

from kelvin.contracts.artifact_errors import ProbeFailed
from kelvin.contracts.artifacts.runtime_control import Probe
from kelvin.contracts.errors import Failure, Internal, InvalidRequest
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.traffic_errors import Overloaded
from runtime.drivers.batching_policy import BatchingWindow, BatchObservation, choose_rows
from runtime.drivers.engine_base import EngineBase
from runtime.drivers.interface import Cancelled, EmbeddingRequest, Event, Failed, Finished, PredictionRequest, Request

_log = logging.getLogger(__name__)
_RETRY_AFTER_S: Final = 1.0

R = TypeVar("R", EmbeddingRequest, PredictionRequest)
A = TypeVar("A")  # the result of a forward for some rows of a request


@dataclass(slots=True)
class LiveRequest(Generic[R]):
    """A request in the engine. `costs` are the tokens of each row; `done_rows` is how many rows have been answered."""

    request: R
    costs: Sequence[int]
    arrived_ns: int
    done_rows: int = 0
    tokens: int = 0
    device_us: int = 0

    @property
    def counts(self) -> Counts:
        """Return the request's cost so far."""
        return Counts(prompt_tokens=self.tokens, device_us=self.device_us)

    @property
    def waiting_costs(self) -> Sequence[int]:
        """Return the costs of the rows that wait."""
        return self.costs[self.done_rows :]


@dataclass(frozen=True, slots=True)
class RowRange(Generic[R]):
    """Rows `start` to `stop` of one request, in one forward."""

    live: LiveRequest[R]
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return self.stop - self.start

    @property
    def tokens(self) -> int:
        """Return the tokens of the rows."""
        return sum(self.live.costs[self.start : self.stop])


class BatchEngine(EngineBase, Generic[R, A]):
    """The base of an engine of rows: queue, round-robin order, batches and costs."""

    def __init__(
        self,
        *,
        version: str,
        probe: Probe | None,
        probe_tokens: int,
        max_waiting: int,
        max_tokens: int,
        window: BatchingWindow | None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(version, probe, probe_tokens, clock_ns)
        self._max_waiting = max_waiting
        self._max_tokens = max_tokens
        self._window = window or BatchingWindow()
        # Requests and their tenants in round-robin order: by arrival, but those of the last forward come last.
        self._live: dict[str, LiveRequest[R]] = {}
        self._tenants: dict[str, None] = {}

    def __repr__(self) -> str:
        state = "poisoned " if self._poisoned else ""
        return f"<{type(self).__name__} {state}requests={len(self._live)} window={self._window.wait_s * 1e3:.1f} ms>"

    @abstractmethod
    def _accept(self, request: Request) -> R | Failure:
        """Return the request if it is of this engine's kind and valid, else the failure."""

    @abstractmethod
    def _costs(self, request: R) -> Sequence[int]:
        """Return the tokens of each row, at least one."""

    @abstractmethod
    def _forward(self, ranges: Sequence[RowRange[R]], probe: Probe | None) -> tuple[list[A | Failure], str | None]:
        """Return an answer or a failure for each range, and what is wrong with the known answers if `probe` is due. The
        answers are ignored if something is wrong. Raises `torch.AcceleratorError` if the device is lost, and nothing
        else.
        """

    @abstractmethod
    def _events(self, rows: RowRange[R], answer: A) -> list[Event]:
        """Return the events for the answer to `rows`. The live request counts the rows already."""

    # `interface.Engine` documents the public members.
    @property
    def has_work(self) -> bool:
        return bool(self._live or self._pending)

    @property
    def batching_delay_s(self) -> float:
        if self._pending or not self._live or self._poisoned or self._is_full():
            return 0.0
        if any(live.done_rows for live in self._live.values()):  # its other rows have waited for a step already
            return 0.0
        first = next(iter(self._live.values()))
        return max(0.0, self._window.wait_s - (self._clock_ns() - first.arrived_ns) / 1e9)

    @property
    def running(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> int:
        return 0

    @property
    def kv_blocks_free(self) -> int:
        return 0

    @property
    def kv_blocks_total(self) -> int:
        return 0

    @property
    def last_layer_started_s(self) -> float:
        return 0.0  # by default a forward counts as short, because its batch is bounded

    def admit(self, request: Request) -> Failure | None:
        if self._poisoned is not None:
            return self._poisoned
        if request.request_id in self._live:
            return InvalidRequest("request_id", request.request_id, "is in use")
        accepted = self._accept(request)
        if isinstance(accepted, Failure):
            return accepted
        if len(self._live) >= self._max_waiting:
            return Overloaded("the engine's queue", self._max_waiting, _RETRY_AFTER_S)
        self._live[request.request_id] = LiveRequest(accepted, self._costs(accepted), self._clock_ns())
        self._tenants.setdefault(accepted.tenant)
        return None

    def cancel(self, request_id: str) -> None:
        if (live := self._live.pop(request_id, None)) is not None:
            self._pending.append(Cancelled(request_id, live.counts))

    def fail_all(self, failure: Failure) -> None:
        for live in self._live.values():
            self._pending.append(Failed(live.request.request_id, failure, live.counts))
        self._live.clear()

    def step(self) -> tuple[Event, ...]:
        if self._live:
            self._compute(self._choose())
        events, self._pending = self._pending, []
        return tuple(events)

    def check_integrity(self) -> None:
        assert self._charged_us == self._busy_ns // 1000, "time is lost"
        assert not (self._poisoned and self._live), "a poisoned engine serves"
        assert 0 <= self._window.wait_s <= self._window.cap_s, "the window is over its cap"
        for request_id, live in self._live.items():
            assert request_id == live.request.request_id, f"{live} is filed as {request_id}"
            assert live.done_rows < len(live.costs), f"{live} should have ended"
            assert live.request.tenant in self._tenants, f"{live}: its tenant has no turn"
            assert live.tokens == sum(live.costs[: live.done_rows]), f"{live}: tokens"

    def _is_full(self) -> bool:
        """Return whether more rows wait than one forward holds."""
        queues = [live.waiting_costs for live in self._live.values()]
        return sum(choose_rows(queues, self._max_tokens)) < sum(map(len, queues))

    def _choose(self) -> list[RowRange[R]]:
        lives = self._round_robin_order()
        counts = choose_rows([live.waiting_costs for live in lives], self._max_tokens)
        return [
            RowRange(live, live.done_rows, live.done_rows + count)
            for live, count in zip(lives, counts, strict=True)
            if count
        ]

    def _round_robin_order(self) -> list[LiveRequest[R]]:
        """Return the requests round-robin: the first request of each tenant, then the second of each, and so on."""
        position = {tenant: index for index, tenant in enumerate(self._tenants)}
        before: Counter[str] = Counter()
        order: list[tuple[int, int, LiveRequest[R]]] = []
        for live in self._live.values():
            tenant = live.request.tenant
            order.append((before[tenant], position[tenant], live))
            before[tenant] += 1
        return [live for _, _, live in sorted(order, key=itemgetter(0, 1))]

    def _move_to_back(self, ranges: Sequence[RowRange[R]]) -> None:
        """Move requests and tenants with rows in this forward behind all others. Forget tenants without requests."""
        for rows in ranges:
            if self._live.pop(rows.live.request.request_id, None) is not None:
                self._live[rows.live.request.request_id] = rows.live
        for tenant in dict.fromkeys(rows.live.request.tenant for rows in ranges):
            self._tenants.pop(tenant, None)
            self._tenants[tenant] = None
        live = {live.request.tenant for live in self._live.values()}
        self._tenants = {tenant: None for tenant in self._tenants if tenant in live}

    def _compute(self, ranges: Sequence[RowRange[R]]) -> None:
        began_ns = self._clock_ns()
        try:
            answers, mismatch = self._forward(ranges, self._probe)
        except torch.AcceleratorError:
            _log.exception("the device is lost")
            self._charge(ranges, self._clock_ns() - began_ns)
            self._poison(Internal())
            return
        self._charge(ranges, self._clock_ns() - began_ns)
        if mismatch is not None:
            self._poison(ProbeFailed(self._version, mismatch))
            return
        self._probe = None
        self._update_window(ranges, began_ns)
        for rows, answer in zip(ranges, answers, strict=True):
            self._record_answer(rows, answer)
        self._move_to_back(ranges)

    def _record_answer(self, rows: RowRange[R], answer: A | Failure) -> None:
        live, request_id = rows.live, rows.live.request.request_id
        live.tokens += rows.tokens
        live.done_rows = rows.stop
        if isinstance(answer, Failure):
            _log.error("request %s: %s", request_id, answer.message)
            del self._live[request_id]
            self._pending.append(Failed(request_id, answer, live.counts))
            return
        self._pending.extend(self._events(rows, answer))
        if live.done_rows == len(live.costs):
            del self._live[request_id]
            self._pending.append(Finished(request_id, "stop", live.counts))

    def _update_window(self, ranges: Sequence[RowRange[R]], began_ns: int) -> None:
        """Adapt the batching window to this batch."""
        if not ranges:
            return
        first_ns = min(rows.live.arrived_ns for rows in ranges)
        joined = sum(rows.live.arrived_ns > first_ns for rows in ranges)
        waited_s = min((began_ns - first_ns) / 1e9, self._window.wait_s)
        compute_s = (self._clock_ns() - began_ns) / 1e9
        self._window = self._window.next_window(BatchObservation(len(ranges), joined, waited_s, compute_s))

    def _charge(self, ranges: Sequence[RowRange[R]], elapsed_ns: int) -> None:
        shares_us = self._divide_step_time(elapsed_ns, [rows.tokens for rows in ranges])
        for rows, share_us in zip(ranges, shares_us, strict=True):
            rows.live.device_us += share_us
