"""Step an engine by hand, or record the events of its thread."""

import threading
import time
from collections.abc import Callable
from itertools import pairwise

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from kelvin.contracts.errors import Failure
from runtime.drivers.interface import Cancelled, Engine, Event, Failed, Finished, Generated
from runtime.surface.served_version import EngineCallbacks

DEADLINE_S = 30.0


class StepClock:
    """A clock that advances by `step_ns` with each reading."""

    def __init__(self, step_ns: int) -> None:
        self.now_ns, self.step_ns = 0, step_ns

    def __call__(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns


def run_to_end(machine: Engine, limit: int = 10_000) -> list[Event]:
    """Step until no work is left, checking integrity after each step. Return the events."""
    events: list[Event] = []
    for _ in range(limit):
        if not machine.has_work:
            return events
        events.extend(machine.step())
        machine.check_integrity()
    raise AssertionError(f"{machine!r} does not come to rest")


def check_progress(machine: Engine, layers: int) -> None:
    """Assert that `last_layer_started_s` advances with each layer of the next step. If not, it counts as hung."""
    progress_s = [time.monotonic()]

    def after(module: nn.Module, _inputs: object, _output: object) -> None:
        if type(module).__name__.endswith("Layer"):
            progress_s.append(machine.last_layer_started_s)

    hook = register_module_forward_hook(after)
    try:
        machine.step()
    finally:
        hook.remove()
    assert len(progress_s) == 1 + layers
    assert all(before < now for before, now in pairwise(progress_s)), progress_s


class EventRecorder:
    """Records what an engine's thread reports: events, and True or False as it becomes busy or idle."""

    def __init__(self) -> None:
        self.log: list[Event | bool] = []
        self._changed = threading.Condition()

    def on_events(self, events: list[Event]) -> None:
        with self._changed:
            self.log.extend(events)
            self._changed.notify_all()

    def on_busy(self, busy: bool) -> None:
        with self._changed:
            self.log.append(busy)
            self._changed.notify_all()

    @property
    def callbacks(self) -> EngineCallbacks:
        """The callbacks, to pass to a restore."""
        return EngineCallbacks(self.on_events, self.on_busy)

    @property
    def events(self) -> list[Event]:
        return [item for item in self.log if not isinstance(item, bool)]

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, Generated)]

    @property
    def failure(self) -> Failure | None:
        return next((event.failure for event in self.events if isinstance(event, Failed)), None)

    def wait(self, what: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(what, DEADLINE_S), self.log

    def wait_for_ends(self, count: int = 1) -> None:
        self.wait(lambda: sum(isinstance(event, Finished | Failed | Cancelled) for event in self.events) >= count)

    def clear(self) -> None:
        with self._changed:
            self.log.clear()
