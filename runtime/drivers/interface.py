"""The interface of an engine: requests, events, and the calls of its thread.

The API side handles text, streams and deadlines; the engine knows token ids. `engine_thread.py` makes all calls.
No torch and no numpy here: arrays have the type Any.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from kelvin.contracts.errors import Failure
from kelvin.contracts.serving.stream_frames import Counts

FinishReason = Literal["stop", "length"]
OWNER_TENANT: Final = ""  # stands for the tenant that owns the version


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
    """A prompt of token ids and how to continue it. A generated id in `stop_ids` ends it and is not reported."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    tenant: str = OWNER_TENANT  # or the guest's tenant; prefill is shared fairly over tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """Sequences of token ids, including special ids. Each becomes one vector."""

    request_id: str
    sequences: tuple[tuple[int, ...], ...]
    tenant: str = OWNER_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRequest:
    """`rows` rows of each input: arrays [rows, …] by name, with the types of the signature."""

    request_id: str
    rows: int
    inputs: Mapping[str, Any]
    tenant: str = OWNER_TENANT


Request = GenerationRequest | EmbeddingRequest | PredictionRequest


@dataclass(frozen=True, slots=True)
class Generated:
    """One more token. `counts` are cumulative, as in every event."""

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
    """The outputs of the next rows, in order: one array [some rows, …] per output, in the signature's order."""

    request_id: str
    outputs: tuple[Any, ...]
    counts: Counts


@dataclass(frozen=True, slots=True)
class Finished:
    """The response is complete. A stop id is neither reported nor counted, so `completion_tokens` always equals the
    number of `Generated` events.
    """

    request_id: str
    reason: FinishReason
    counts: Counts


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed and its blocks are free. Tokens that were reported before stay valid."""

    request_id: str
    failure: Failure
    counts: Counts


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The request was cancelled and its blocks are free."""

    request_id: str
    counts: Counts


Event = Generated | Embedded | Predicted | Finished | Failed | Cancelled


class Engine(Protocol):
    """The computation of one model. Single-threaded: one thread makes all calls. Each admitted request ends with
    exactly one of Finished, Failed and Cancelled.
    """

    def admit(self, request: Request) -> Failure | None:
        """Queue a request, or return why not (over a limit, can never fit, queue full, poisoned) without an event."""
        ...

    def cancel(self, request_id: str) -> None:
        """Free a request's blocks at once. The next step returns `Cancelled`. Unknown or ended ids are ignored."""
        ...

    def fail_all(self, failure: Failure) -> None:
        """End every request with `failure`. The next step returns the events."""
        ...

    def step(self) -> tuple[Event, ...]:
        """Compute one forward over what fits in the step's budget. Return its events in order, () when idle. Never
        raises for a fault of a request or of the model: those are `Failed` events.
        """
        ...

    def run_probe_alone(self) -> Failure | None:
        """Verify the known answers without a request, if they are still unverified. Return the failure, if any."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if requests, blocks and queues disagree."""
        ...

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to compute or to report."""
        ...

    @property
    def batching_delay_s(self) -> float:
        """Return how many seconds the next step should wait for more requests to share it; 0 for none."""
        ...

    @property
    def running(self) -> int:
        """Return how many requests hold KV blocks. An engine without KV cache counts all requests inside."""
        ...

    @property
    def waiting(self) -> int:
        """Return how many admitted requests hold no KV blocks yet; 0 for an engine without KV cache."""
        ...

    @property
    def kv_blocks_free(self) -> int:
        """Return how many blocks no request holds."""
        ...

    @property
    def kv_blocks_total(self) -> int:
        """Return how many blocks requests may hold."""
        ...

    @property
    def busy_ns(self) -> int:
        """Return the nanoseconds spent in steps: what requests were charged, plus the probe's share."""
        ...

    @property
    def last_layer_started_s(self) -> float:
        """Return when a step last began a layer, in CLOCK_MONOTONIC seconds; 0 if layers are not followed. A step
        over a long prompt may take minutes on a busy core; one without progress hangs. Read from any thread.
        """
        ...

    @property
    def needs_probe(self) -> bool:
        """Return whether known answers were given and are not verified yet."""
        ...

    @property
    def poisoned(self) -> Failure | None:
        """Return why this engine will never serve again; None if it may."""
        ...
