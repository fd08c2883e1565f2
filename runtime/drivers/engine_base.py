"""The parts of an engine that all kinds of models share: the known answers, the poisoned state, and step times."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from kelvin.contracts.artifacts.runtime_control import Probe
from kelvin.contracts.errors import Failure
from runtime.drivers.interface import Event

_log = logging.getLogger(__name__)


class EngineBase(ABC):
    """An engine over one bound model; subclasses complete `interface.Engine`.

    With a `probe`, nothing is reported before the probe matched. The probe runs with the first batch, or before it. If
    it does not match, all requests fail and the engine is poisoned: it refuses all later ones.
    """

    def __init__(self, version: str, probe: Probe | None, probe_tokens: int, clock_ns: Callable[[], int]) -> None:
        self._version = version
        self._probe = probe
        self._probe_tokens = probe_tokens
        self._clock_ns = clock_ns
        self._pending: list[Event] = []  # events that the next step returns
        self._poisoned: Failure | None = None
        self._busy_ns = 0
        self._charged_us = 0  # the part of _busy_ns that was divided among requests and probe

    # `interface.Engine` documents the public members.
    @property
    def busy_ns(self) -> int:
        return self._busy_ns

    @property
    def needs_probe(self) -> bool:
        return self._probe is not None

    @property
    def poisoned(self) -> Failure | None:
        return self._poisoned

    @abstractmethod
    def fail_all(self, failure: Failure) -> None: ...

    def run_probe_alone(self) -> Failure | None:
        if self._probe is not None:
            self._compute([])
        return self._poisoned

    @abstractmethod
    def _compute(self, work: Sequence[Any], /) -> None:
        """Run one forward over `work`, together with the probe if it is still due."""

    def _divide_step_time(self, elapsed_ns: int, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return each request's share of a step in microseconds, by its tokens. No request gets the probe's share.

        Nanoseconds carry over, so that all shares sum to `busy_ns` // 1000.
        """
        self._busy_ns += elapsed_ns
        due_us = self._busy_ns // 1000 - self._charged_us
        self._charged_us += due_us
        probe_tokens = 0 if self._probe is None else self._probe_tokens
        return apportion(due_us, [*tokens, probe_tokens])[:-1]

    def _poison(self, failure: Failure) -> None:
        """Fail closed: fail every request in the engine, and refuse all later ones."""
        _log.error("poisoned: %s", failure.message)
        self._poisoned = failure
        self._probe = None
        self.fail_all(failure)


def apportion(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Divide `total` into whole shares proportional to `weights` (not all zero). They sum to it exactly; each is within
    one of its exact value.
    """
    total_weight = sum(weights)
    shares: list[int] = []
    cumulative_weight = divided = 0
    for weight in weights:
        cumulative_weight += weight
        due = total * cumulative_weight // total_weight
        shares.append(due - divided)
        divided = due
    return tuple(shares)
