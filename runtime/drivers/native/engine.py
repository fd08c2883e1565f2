"""The decoders' engine: a queue, the sequences that hold KV blocks, and a step that advances them by one forward.

`schedule_policy.py` chooses a step's tokens; the model runner and its attention backend compute them. Single-threaded.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

import torch

from kelvin.contracts.artifact_errors import ProbeFailed
from kelvin.contracts.artifacts.runtime_control import GateFacts, Probe
from kelvin.contracts.errors import CapacityExceeded, Failure, Internal, InvalidRequest, LimitExceeded, Refused
from kelvin.contracts.traffic_errors import Overloaded
from runtime.drivers.engine_base import EngineBase
from runtime.drivers.interface import (
    OWNER_TENANT,
    Cancelled,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generated,
    GenerationRequest,
    Request,
    Sampling,
)
from runtime.drivers.native.batch import LiveSequence, SequenceSlice, slots_in_blocks
from runtime.drivers.native.kv_blocks_policy import BLOCK_SIZE, BlockPool, blocks_for, worst_case_tokens
from runtime.drivers.native.model_runner import BatchBackend, DeviceLost, ModelRunner
from runtime.drivers.native.sampler import SamplingChoice, choose_tokens
from runtime.drivers.native.sdpa_backend import SdpaBackend
from runtime.drivers.native.varlen_backend import VarlenBackend, find_varlen, supports_model
from runtime.drivers.schedule_policy import CPU_BUDGET, CUDA_BUDGET, Budget, plan_step
from runtime.models import probe as known_answers
from runtime.models.binding import BoundModel

_log = logging.getLogger(__name__)
_RETRY_AFTER_S: Final = 1.0
OWNER_RESERVE_DIVISOR: Final = 8  # 1/8 of the KV blocks is reserved for the version's owner against guests


def build_backend(facts: GateFacts, blocks: int, dtype: torch.dtype, device: torch.device) -> BatchBackend:
    """Return the attention backend for this device, with a pool of `blocks` blocks."""
    varlen = find_varlen() if device.type == "cuda" else None
    if varlen is None or not supports_model(facts, dtype, torch.cuda.get_device_capability(device)):
        return SdpaBackend(facts, blocks, dtype, device)
    return VarlenBackend(facts, blocks, dtype, device, varlen)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of one request."""

    vocab_size: int
    max_positions: int
    kv_blocks: int


def find_refusal(request: GenerationRequest, limits: EngineLimits) -> Failure | None:
    """Return why the request can never run here, or None. The first reason wins."""
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        return InvalidRequest("prompt", "[]", "must hold a token")
    # On a device, an id outside the embedding would break the whole CUDA context, not only this request.
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        invalid_id = next(token for token in prompt if not 0 <= token < limits.vocab_size)
        return InvalidRequest("prompt", str(invalid_id), f"must be a token id from 0 to {limits.vocab_size - 1}")
    if (fault := _sampling_fault(sampling)) is not None:
        return fault
    total = len(prompt) + sampling.max_tokens
    if total > limits.max_positions:
        return LimitExceeded("prompt plus max_tokens", total, limits.max_positions, "tokens")
    need = blocks_for(worst_case_tokens(len(prompt), sampling.max_tokens))
    if need > limits.kv_blocks:
        return CapacityExceeded("KV blocks for prompt plus max_tokens", need, limits.kv_blocks)
    return None


def _sampling_fault(sampling: Sampling) -> InvalidRequest | None:
    if sampling.max_tokens < 1:
        return InvalidRequest("max_tokens", str(sampling.max_tokens), "must be 1 or more")
    if not (isfinite(sampling.temperature) and sampling.temperature >= 0):
        return InvalidRequest("temperature", str(sampling.temperature), "must be 0 or more")
    if not 0 < sampling.top_p <= 1:
        return InvalidRequest("top_p", str(sampling.top_p), "must be over 0 and at most 1")
    if sampling.top_k < 0:
        return InvalidRequest("top_k", str(sampling.top_k), "must be 0 (off) or more")
    return None


class ModelEngine(EngineBase):
    """The engine of one bound decoder. `kv_bytes` is the limit of the KV pool.

    A request runs once blocks for its worst case (prompt plus `max_tokens`) are free. It keeps them to its end, so none
    is preempted. Raises `Refused(CapacityExceeded)` if no block fits.
    """

    def __init__(
        self,
        bound: BoundModel,
        facts: GateFacts,
        *,
        version: str,
        kv_bytes: int,
        device: torch.device,
        probe: Probe | None = None,
        max_running: int = 64,
        max_waiting: int = 1024,
        budget: Budget | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        probe_tokens = 0 if probe is None else len(probe.token_ids)
        super().__init__(version, probe, probe_tokens, clock_ns)
        probe_blocks = blocks_for(probe_tokens)
        block_bytes = BLOCK_SIZE * facts.kv_bytes_per_token
        total = kv_bytes // block_bytes - probe_blocks
        if total < 1:
            raise Refused(CapacityExceeded("KV bytes", (1 + probe_blocks) * block_bytes, kv_bytes))
        backend = build_backend(facts, total + probe_blocks, bound.config.dtype, device)
        self._runner = ModelRunner(bound.module, backend, device)
        self._device = device
        self._budget = budget or (CUDA_BUDGET if device.type == "cuda" else CPU_BUDGET)
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._limits = EngineLimits(facts.vocab_size, facts.max_positions, total)
        self._pool = BlockPool(total)
        self._waiting: dict[str, LiveSequence] = {}  # in order of arrival, as is _running
        self._running: dict[str, LiveSequence] = {}
        self._probe_slots = slots_in_blocks(range(total, total + probe_blocks), device)

    def __repr__(self) -> str:
        state = "poisoned " if self._poisoned else ""
        return f"<ModelEngine {state}running={self.running} waiting={self.waiting} {self._pool!r}>"

    # `interface.Engine` documents the public members.
    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._pending)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_blocks_free(self) -> int:
        return self._pool.free

    @property
    def kv_blocks_total(self) -> int:
        return self._pool.total

    @property
    def last_layer_started_s(self) -> float:
        return self._runner.last_layer_started_s

    @property
    def batching_delay_s(self) -> float:
        return 0.0  # later requests join the next step

    def admit(self, request: Request) -> Failure | None:
        if self._poisoned is not None:
            return self._poisoned
        if not isinstance(request, GenerationRequest):
            return Internal()  # the API sends a decoder nothing else
        if request.request_id in self._waiting or request.request_id in self._running:
            return InvalidRequest("request_id", request.request_id, "is in use")
        if (refusal := find_refusal(request, self._limits)) is not None:
            return refusal
        if len(self._waiting) >= self._max_waiting:
            return Overloaded("the engine's queue", self._max_waiting, _RETRY_AFTER_S)
        self._waiting[request.request_id] = LiveSequence(request)
        return None

    def cancel(self, request_id: str) -> None:
        sequence = self._running.get(request_id) or self._waiting.get(request_id)
        if sequence is not None:
            self._pending.append(Cancelled(request_id, self._release(sequence).counts))

    def fail_all(self, failure: Failure) -> None:
        for sequence in [*self._running.values(), *self._waiting.values()]:
            self._pending.append(Failed(sequence.request.request_id, failure, self._release(sequence).counts))

    def step(self) -> tuple[Event, ...]:
        self._start_waiting()
        running = list(self._running.values())
        plan = plan_step([sequence.state for sequence in running], self._budget)
        if plan:
            self._compute([(running[allotment.index], allotment.count) for allotment in plan])
        events, self._pending = self._pending, []
        return tuple(events)

    def _start_waiting(self) -> None:
        """Start waiting requests while their KV blocks are free.

        The oldest request of the tenant with the fewest blocks is next. If it does not fit yet, only the owner's
        request may overtake it, within the blocks that are reserved for the owner. No request starves, with one
        exception. While the owner runs anything, a guest's request that needs reserved blocks waits. Others overtake
        it.
        """
        reserved = self._pool.total // OWNER_RESERVE_DIVISOR
        while self._waiting and len(self._running) < self._max_running:
            held: Counter[str] = Counter()
            for sequence in self._running.values():
                held[sequence.request.tenant] += len(sequence.blocks)
            guest_max = self._pool.total - (reserved if held[OWNER_TENANT] else 0)  # blocks of one guest's request
            candidates = [
                sequence
                for sequence in self._waiting.values()
                if sequence.request.tenant == OWNER_TENANT or sequence.max_blocks <= guest_max
            ]
            if not candidates:
                return
            unused = max(0, reserved - held[OWNER_TENANT])
            sequence = min(candidates, key=lambda each: held[each.request.tenant])  # the oldest one of that tenant
            if self._try_start(sequence, unused):
                continue
            owner_next = next((each for each in candidates if each.request.tenant == OWNER_TENANT), sequence)
            if owner_next is sequence or owner_next.max_blocks > unused or not self._try_start(owner_next, unused):
                return

    def _try_start(self, sequence: LiveSequence, unused: int) -> bool:
        """Start a waiting request if its blocks are free. Return whether it started.

        A guest keeps its blocks until it ends, so it must leave `unused` reserved blocks free, unless nothing runs.
        """
        count = sequence.max_blocks
        if sequence.request.tenant != OWNER_TENANT and self._running and count > self._pool.free - unused:
            return False
        blocks = self._pool.try_allocate(count)
        if blocks is None:
            return False
        sequence.assign_blocks(blocks, self._device)
        del self._waiting[sequence.request.request_id]
        self._running[sequence.request.request_id] = sequence
        return True

    def _release(self, sequence: LiveSequence) -> LiveSequence:
        self._waiting.pop(sequence.request.request_id, None)
        self._running.pop(sequence.request.request_id, None)
        self._pool.release(sequence.blocks)
        sequence.blocks = ()
        return sequence

    def _compute(self, work: Sequence[tuple[LiveSequence, int]]) -> None:
        began_ns = self._clock_ns()
        slices = [_next_slice(sequence, count) for sequence, count in work]
        if (probe := self._probe) is not None:
            slices.append(SequenceSlice(probe.token_ids, 0, self._probe_slots, self._probe_tokens))
        mismatch: str | None = None
        try:
            logits = self._runner.run(slices)
            if probe is not None:
                answers = logits.pop()
                mismatch = "it raised" if answers is None else known_answers.verify(probe, answers)
            tokens = _choose(work, logits) if mismatch is None else []
        except (DeviceLost, torch.AcceleratorError):  # kernels run asynchronously: reading a result may raise it
            _log.exception("the device is lost")
            self._charge(work, self._clock_ns() - began_ns)
            self._poison(Internal())
            return
        self._charge(work, self._clock_ns() - began_ns)
        if mismatch is not None:
            self._poison(ProbeFailed(self._version, mismatch))
            return
        self._probe = None
        for (sequence, count), slice_logits, token in zip(work, logits, tokens, strict=True):
            self._advance(sequence, count, slice_logits, token)

    def _advance(self, sequence: LiveSequence, count: int, logits: torch.Tensor | None, token: int | None) -> None:
        """Apply the forward's result to one sequence."""
        request = sequence.request
        if logits is None or (len(logits) > 0 and token is None):
            why = "no forward" if logits is None else "logits not finite"
            _log.error("a request fails", extra={"request_id": request.request_id, "why": why})
            self._pending.append(Failed(request.request_id, Internal(), self._release(sequence).counts))
            return
        sequence.computed_tokens += count
        if token is None:
            return  # part of its prompt remains
        if token in request.stop_ids:
            self._finish(sequence, "stop")
            return
        sequence.tokens.append(token)
        self._pending.append(Generated(request.request_id, token, sequence.counts))
        if sequence.generated_tokens == request.sampling.max_tokens:
            self._finish(sequence, "length")

    def _finish(self, sequence: LiveSequence, reason: FinishReason) -> None:
        self._pending.append(Finished(sequence.request.request_id, reason, self._release(sequence).counts))

    def _charge(self, work: Sequence[tuple[LiveSequence, int]], elapsed_ns: int) -> None:
        shares_us = self._divide_step_time(elapsed_ns, [count for _, count in work])
        for (sequence, _), share_us in zip(work, shares_us, strict=True):
            sequence.device_us += share_us

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        assert not self._waiting.keys() & self._running.keys(), "a request waits and runs"
        held = [block for sequence in self._running.values() for block in sequence.blocks]
        assert len(set(held)) == len(held), "two sequences hold a block"
        assert len(held) + self._pool.free == self._pool.total, "a block is lost"
        assert self._charged_us == self._busy_ns // 1000, "time is lost"
        assert not (self._poisoned and (self._running or self._waiting)), "a poisoned engine serves"
        assert len(self._running) <= self._max_running, "too many run"
        for sequence in self._waiting.values():
            assert not sequence.blocks, f"{sequence} waits and holds blocks"
            assert sequence.computed_tokens == 0, f"{sequence} waits and was computed"
        for sequence in self._running.values():
            assert len(sequence.blocks) == sequence.max_blocks, f"{sequence}: blocks"
            assert sequence.computed_tokens < len(sequence.tokens), f"{sequence} has nothing to compute"
            assert sequence.generated_tokens < sequence.request.sampling.max_tokens, f"{sequence} should have ended"


def _next_slice(sequence: LiveSequence, count: int) -> SequenceSlice:
    """Return the slice of the next `count` tokens. It asks for logits only if it ends with the last known token."""
    start, end = sequence.computed_tokens, sequence.computed_tokens + count
    return SequenceSlice(tuple(sequence.tokens[start:end]), start, sequence.slots, int(end == len(sequence.tokens)))


def _choose(work: Sequence[tuple[LiveSequence, int]], logits: Sequence[torch.Tensor | None]) -> list[int | None]:
    """Return a token for each slice with logits whose highest is finite; None for the others."""
    with_logits = [index for index, rows in enumerate(logits) if rows is not None and len(rows) > 0]
    tokens: list[int | None] = [None] * len(work)
    if with_logits:
        choices = [SamplingChoice(work[index][0].request.sampling, work[index][0].draw()) for index in with_logits]
        rows = torch.cat([found for index in with_logits if (found := logits[index]) is not None])
        for index, token in zip(with_logits, choose_tokens(rows, choices), strict=True):
            tokens[index] = token
    return tokens
