"""An engine that follows a script, for tests of the engine's surroundings."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kelvin.contracts.errors import Failure
from kelvin.contracts.serving.stream_frames import Counts
from runtime.drivers.interface import Cancelled, Event, Failed, Finished, Generated, GenerationRequest, Request

DEADLINE_S = 20.0
BLOCKS = 64


@dataclass
class _Sequence:
    request: GenerationRequest
    script: list[int]
    done: int = 0

    @property
    def counts(self) -> Counts:
        return Counts(len(self.request.prompt_ids), 0, self.done, self.done * 10)


class ScriptedEngine:
    """Each step gives each request its script's next token, then Finished. Each request holds one block.
    `allow(n)` permits n steps if `paced`; a step takes `step_s`. `refuse`, `break_with`, `raises` (one for each step),
    `probe_failure` and `poisoned` set failures. `in_step` and `probed` show the progress."""

    def __init__(
        self, script: Callable[[GenerationRequest], Sequence[int]], *, paced: bool = False, step_s: float = 0.0
    ) -> None:
        self._script = script
        self.reports_progress = False  # report progress by layers during a step
        self._step_s = step_s
        self._paced = paced
        self._permits = threading.Semaphore(0)
        self._live: dict[str, _Sequence] = {}
        self._pending: list[Event] = []
        self.refuse: Failure | None = None
        self.break_with: Failure | None = None
        self.raises: list[Exception] = []
        self.probe_failure: Failure | None = None
        self.poisoned: Failure | None = None
        self.needs_probe = False
        self.in_step = threading.Event()
        self.probed = threading.Event()
        self.threads: set[int] = set()
        self.admitted: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.generated = 0  # tokens of all requests
        self.busy_ns = 0

    def allow(self, steps: int = 1) -> None:
        self._permits.release(steps)

    def run_freely(self) -> None:
        self._paced = False
        self._permits.release(1)

    @property
    def last_layer_started_s(self) -> float:
        return time.monotonic() if self.reports_progress else 0.0

    @property
    def batching_delay_s(self) -> float:
        return 0.0

    def admit(self, request: Request) -> Failure | None:
        assert isinstance(request, GenerationRequest)
        if self.refuse is not None:
            return self.refuse
        self.admitted.append(request)
        script = list(self._script(request))[: request.sampling.max_tokens]
        self._live[request.request_id] = _Sequence(request, script)
        return None

    def cancel(self, request_id: str) -> None:
        if (sequence := self._live.pop(request_id, None)) is not None:
            self.cancelled.append(request_id)
            self._pending.append(Cancelled(request_id, sequence.counts))

    def fail_all(self, failure: Failure) -> None:
        self._pending += [Failed(request_id, failure, each.counts) for request_id, each in self._live.items()]
        self._live.clear()

    def step(self) -> tuple[Event, ...]:
        self.threads.add(threading.get_ident())
        self.in_step.set()
        if self._paced and self._live:
            assert self._permits.acquire(timeout=DEADLINE_S), "no step was allowed"
        threading.Event().wait(self._step_s)  # the time to compute
        if self.raises:
            raise self.raises.pop()
        self.needs_probe = False
        if self.break_with is not None:
            self.fail_all(self.break_with)
        for request_id, sequence in list(self._live.items()):
            if sequence.done < len(sequence.script):
                token = sequence.script[sequence.done]
                sequence.done += 1
                self.generated += 1
                self._pending.append(Generated(request_id, token, sequence.counts))
            if sequence.done == len(sequence.script):
                del self._live[request_id]
                full = sequence.done == sequence.request.sampling.max_tokens
                self._pending.append(Finished(request_id, "length" if full else "stop", sequence.counts))
        events, self._pending = self._pending, []
        return tuple(events)

    def run_probe_alone(self) -> Failure | None:
        self.needs_probe = False
        self.poisoned = self.probe_failure or self.poisoned
        self.probed.set()
        return self.poisoned

    def check_integrity(self) -> None:
        pass

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._pending)

    @property
    def running(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> int:
        return 0

    @property
    def kv_blocks_free(self) -> int:
        return BLOCKS - len(self._live)

    @property
    def kv_blocks_total(self) -> int:
        return BLOCKS
