"""An engine for encoders: requests wait, a step embeds as many of their sequences as one forward should hold.

Implements `engine.interface.Engine`, so thread, streams, metering and delivery are those of the decoders. What a step
takes, and how long it is worth waiting for more, is `policy.batching`'s. Single-threaded.
"""

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from contracts.artifact_errors import ProbeFailed
from contracts.control import GateFacts, Probe
from contracts.errors import Failure, Internal, InvalidRequest, LimitExceeded, Overloaded
from contracts.frames import Counts
from runtime.binding import BoundModel
from runtime.encoder import probe as known_answers
from runtime.encoder.model import EncoderModel
from runtime.encoder.recipe import Recipe
from runtime.engine.interface import Cancelled, Embedded, EmbeddingRequest, Event, Failed, Finished, Request
from runtime.policy.batching import CPU_TOKENS, CUDA_TOKENS, Batch, Window, take
from runtime.policy.schedule import divide

_log = logging.getLogger(__name__)
_RETRY_AFTER_S: Final = 1.0


@dataclass(slots=True)
class _Live:
    """A request inside. `done` of its sequences have their vectors."""

    request: EmbeddingRequest
    arrived_ns: int
    done: int = 0
    tokens: int = 0
    device_us: int = 0

    @property
    def counts(self) -> Counts:
        return Counts(prompt_tokens=self.tokens, device_us=self.device_us)

    @property
    def lengths(self) -> list[int]:
        """Of the sequences that wait."""
        return [len(sequence) for sequence in self.request.sequences[self.done :]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some sequences of one request, in one forward."""

    live: _Live
    sequences: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))


class EncoderEngine:
    """One bound encoder. With a `probe`, no vector leaves before it matched, as in `ModelEngine`."""

    def __init__(
        self,
        bound: BoundModel,
        recipe: Recipe,
        facts: GateFacts,
        *,
        version: str,
        device: torch.device,
        probe: Probe | None = None,
        max_waiting: int = 1024,
        max_tokens: int | None = None,
        window: Window | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._model = EncoderModel(bound, recipe, device)
        self._facts = facts
        self._version = version
        self._probe = probe
        self._max_waiting = max_waiting
        self._max_tokens = max_tokens or (CUDA_TOKENS if device.type == "cuda" else CPU_TOKENS)
        self._window = window or Window()
        self._clock_ns = clock_ns
        self._live: dict[str, _Live] = {}  # in order of arrival
        self._pending: list[Event] = []  # for the next step to return
        self._poisoned: Failure | None = None
        self._busy_ns = 0
        self._charged_us = 0

    def __repr__(self) -> str:
        state = "poisoned " if self._poisoned else ""
        return f"<EncoderEngine {state}requests={len(self._live)} window={self._window.wait_s * 1e3:.1f} ms>"

    @property
    def has_work(self) -> bool:
        """See `interface.Engine`, as for all that follows."""
        return bool(self._live or self._pending)

    @property
    def linger_s(self) -> float:
        if self._pending or not self._live or self._poisoned or self._is_full():
            return 0.0
        first = next(iter(self._live.values()))
        if first.done:  # what is left of it has waited for a step already
            return 0.0
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
    def busy_ns(self) -> int:
        return self._busy_ns

    @property
    def needs_probe(self) -> bool:
        return self._probe is not None

    @property
    def poisoned(self) -> Failure | None:
        return self._poisoned

    def admit(self, request: Request) -> Failure | None:
        if self._poisoned is not None:
            return self._poisoned
        if not isinstance(request, EmbeddingRequest):
            return Internal()  # the API asks nothing else of what embeds
        if request.request_id in self._live:
            return InvalidRequest("request_id", request.request_id, "is in use")
        if (refusal := self._judge(request)) is not None:
            return refusal
        if len(self._live) >= self._max_waiting:
            return Overloaded("the engine's queue", self._max_waiting, _RETRY_AFTER_S)
        self._live[request.request_id] = _Live(request, self._clock_ns())
        return None

    def _judge(self, request: EmbeddingRequest) -> Failure | None:
        if not request.sequences:
            return InvalidRequest("input", "[]", "must hold a text")
        for sequence in request.sequences:
            if not sequence:
                return InvalidRequest("input", "[]", "must hold a token")
            if len(sequence) > self._facts.max_positions:
                return LimitExceeded("input", len(sequence), self._facts.max_positions, "tokens")
            # On a device an id outside the embedding would be an error of the whole context, not of the request.
            if min(sequence) < 0 or max(sequence) >= self._facts.vocab_size:
                stranger = next(token for token in sequence if not 0 <= token < self._facts.vocab_size)
                return InvalidRequest("input", str(stranger), f"must be a token id under {self._facts.vocab_size}")
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

    def run_probe_alone(self) -> Failure | None:
        if self._probe is not None:
            self._compute([])
        return self._poisoned

    def check_integrity(self) -> None:
        assert self._charged_us == self._busy_ns // 1000, "time is lost"
        assert not (self._poisoned and self._live), "a poisoned engine serves"
        assert 0 <= self._window.wait_s <= self._window.cap_s, "the window is over its cap"
        for request_id, live in self._live.items():
            assert request_id == live.request.request_id, f"{live} is filed as {request_id}"
            assert live.done < len(live.request.sequences), f"{live} should have ended"
            assert live.tokens == sum(map(len, live.request.sequences[: live.done])), f"{live}: tokens"

    def _is_full(self) -> bool:
        """Whether what waits is more than one forward holds."""
        queues = [live.lengths for live in self._live.values()]
        return sum(take(queues, self._max_tokens)) < sum(map(len, queues))

    def _choose(self) -> list[_Part]:
        lives = list(self._live.values())
        counts = take([live.lengths for live in lives], self._max_tokens)
        return [
            _Part(live, live.request.sequences[live.done : live.done + count])
            for live, count in zip(lives, counts, strict=True)
            if count
        ]

    def _compute(self, parts: Sequence[_Part]) -> None:
        """One forward over `parts`, and the probe's row where it is still due."""
        began_ns = self._clock_ns()
        probe, mismatch = self._probe, None
        rows = [sequence for part in parts for sequence in part.sequences]
        try:
            found = self._vectors(parts, [*rows, probe.token_ids] if probe else rows)
            if probe is not None:
                answer = found.pop()
                mismatch = "it raised" if answer is None else known_answers.verify(probe, answer[0])
        except torch.AcceleratorError:
            _log.exception("the device is lost")
            self._charge(parts, self._clock_ns() - began_ns)
            self._poison(Internal())
            return
        self._charge(parts, self._clock_ns() - began_ns)
        if mismatch is not None:
            self._poison(ProbeFailed(self._version, mismatch))
            return
        self._probe = None
        self._learn(parts, began_ns)
        for part, vectors in zip(parts, found, strict=True):
            self._settle(part, vectors)

    def _vectors(self, parts: Sequence[_Part], rows: Sequence[tuple[int, ...]]) -> list[torch.Tensor | None]:
        """Vectors of each part, and of what `rows` has beyond them; None for one that raised, alone too."""
        counts = [len(part.sequences) for part in parts]
        if len(rows) > sum(counts):
            counts.append(1)
        try:
            return list(torch.split(self._model.embed(rows), counts))
        except torch.AcceleratorError:
            raise
        except Exception:
            _log.warning("a forward of %d sequences failed; repeating it by requests", len(rows), exc_info=True)
        found: list[torch.Tensor | None] = []
        at = 0
        for count in counts:
            found.append(self._try_embed(rows[at : at + count]))
            at += count
        return found

    def _try_embed(self, rows: Sequence[tuple[int, ...]]) -> torch.Tensor | None:
        try:
            return self._model.embed(rows)
        except torch.AcceleratorError:
            raise
        except Exception:
            _log.exception("a forward of one request failed")
            return None

    def _settle(self, part: _Part, vectors: torch.Tensor | None) -> None:
        live, request_id = part.live, part.live.request.request_id
        live.tokens += part.tokens
        live.done += len(part.sequences)
        if vectors is None or not bool(torch.isfinite(vectors).all()):
            _log.error("request %s: %s", request_id, "no forward" if vectors is None else "vectors not finite")
            del self._live[request_id]
            self._pending.append(Failed(request_id, Internal(), live.counts))
            return
        for row in vectors:
            self._pending.append(Embedded(request_id, array("f", row.tolist()).tobytes(), live.counts))
        if live.done == len(live.request.sequences):
            del self._live[request_id]
            self._pending.append(Finished(request_id, "stop", live.counts))

    def _learn(self, parts: Sequence[_Part], began_ns: int) -> None:
        """Adapt the window to what this batch showed."""
        if not parts:
            return
        first_ns = min(part.live.arrived_ns for part in parts)
        joined = sum(part.live.arrived_ns > first_ns for part in parts)
        waited_s = min((began_ns - first_ns) / 1e9, self._window.wait_s)
        compute_s = (self._clock_ns() - began_ns) / 1e9
        self._window = self._window.after(Batch(len(parts), joined, waited_s, compute_s))

    def _charge(self, parts: Sequence[_Part], elapsed_ns: int) -> None:
        """Divide the step by tokens; nanoseconds are carried over, so that all shares sum to `busy_ns` // 1000."""
        self._busy_ns += elapsed_ns
        due_us = self._busy_ns // 1000 - self._charged_us
        self._charged_us += due_us
        probe_tokens = 0 if self._probe is None else len(self._probe.token_ids)
        shares = divide(due_us, [*(part.tokens for part in parts), probe_tokens])
        for part, share in zip(parts, shares, strict=False):
            part.live.device_us += share

    def _poison(self, failure: Failure) -> None:
        """Fail closed: everything inside and everything to come."""
        _log.error("poisoned: %s", failure.message)
        self._poisoned = failure
        self._probe = None
        self.fail_all(failure)
