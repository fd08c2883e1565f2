"""What an engine takes and gives: requests, events, and the surface that its thread drives.

No torch and no numpy here: arrays pass through as Any. Of an engine the API side imports this file, and the thread that
drives it. Text, streams and deadlines are the API side's; the engine knows token ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kelvin.contracts.errors import Failure
from kelvin.contracts.serving.stream_frames import Counts

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; top-k comes before top-p."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A prompt of token ids and what to make of it. A generated id of `stop_ids` ends it and is not handed out."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    tenant: str = ""  # the guest that asks, "" for the owner, as in all requests; prompts of tenants have equal parts


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """Sequences of token ids, special ones included; each becomes a vector."""

    request_id: str
    sequences: tuple[tuple[int, ...], ...]
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRequest:
    """`rows` of each input; arrays [rows, …] by name, of the types that the signature says."""

    request_id: str
    rows: int
    inputs: Mapping[str, Any]
    tenant: str = ""


Request = GenerationRequest | EmbeddingRequest | PredictionRequest


@dataclass(frozen=True, slots=True)
class Generated:
    """One token more. `counts` are cumulative, as in every event."""

    request_id: str
    token_id: int
    counts: Counts


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vector of the next sequence, in order: float32, little-endian."""

    request_id: str
    vector: bytes
    counts: Counts


@dataclass(frozen=True, slots=True)
class Predicted:
    """The outputs of the next rows, in order: an array [some rows, …] of each, in the signature's order."""

    request_id: str
    outputs: tuple[Any, ...]
    counts: Counts


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete. The stop id of a `stop` is neither handed out nor counted: `completion_tokens` is always
    the number of `Generated` events."""

    request_id: str
    reason: FinishReason
    counts: Counts


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ends here; its blocks are free. Tokens handed out before stand."""

    request_id: str
    failure: Failure
    counts: Counts


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The request was cancelled; its blocks are free."""

    request_id: str
    counts: Counts


Event = Generated | Embedded | Predicted | Finished | Failed | Cancelled


class Engine(Protocol):
    """Single-threaded: whoever steps it makes every other call too. Each admitted request ends in exactly one of
    Finished, Failed and Cancelled."""

    def admit(self, request: Request) -> Failure | None:
        """Queue it. A refusal (over a limit, can never fit, queue full, engine poisoned) is returned, with no event."""
        ...

    def cancel(self, request_id: str) -> None:
        """Frees its blocks at once; `Cancelled` comes from the next step. Unknown or ended ids are ignored."""
        ...

    def fail_all(self, failure: Failure) -> None:
        """End every request with `failure`; the events come from the next step."""
        ...

    def step(self) -> tuple[Event, ...]:
        """One forward over what fits in the step's budget, and its events in order; () when idle. Never raises for a
        fault of a request or of the model: those are `Failed` events."""
        ...

    def run_probe_alone(self) -> Failure | None:
        """Verify the known answers without a request, where there are any and no batch carried them yet."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError where requests, blocks and queues disagree."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        ...

    @property
    def batching_delay_s(self) -> float:
        """How long the next step should wait for what may come and share it; 0 where it should not."""
        ...

    @property
    def running(self) -> int:
        """Requests that hold KV blocks; of an engine without any, all requests inside."""
        ...

    @property
    def waiting(self) -> int:
        """Requests admitted that hold no KV blocks yet; of an engine without any, 0."""
        ...

    @property
    def kv_blocks_free(self) -> int:
        """Blocks that no request holds."""
        ...

    @property
    def kv_blocks_total(self) -> int:
        """Blocks of the pool that requests may hold."""
        ...

    @property
    def busy_ns(self) -> int:
        """Nanoseconds spent in steps so far: the sum of what its requests were charged, and of probes run alone."""
        ...

    @property
    def progressed_s(self) -> float:
        """CLOCK_MONOTONIC seconds when a step last moved on by a layer, 0 where no layer is followed. A step over a
        long prompt may take minutes on a busy core; one that stops moving hangs. Read from any thread."""
        ...

    @property
    def needs_probe(self) -> bool:
        """Whether known answers were given and are not verified yet."""
        ...

    @property
    def poisoned(self) -> Failure | None:
        """Why this engine will never serve again, where it will not."""
        ...
