"""The base class of worlds: real modules, operations on them, and invariants."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final, TypeVar

from tests.simulation.core.determinism import Clocks
from tests.simulation.core.simulation_loop import SimulationLoop, describe

W = TypeVar("W", bound="World")
Operation = Callable[[Any, Random], Awaitable[None]]
Invariant = Callable[[Any], None]

ROUNDS: Final = 8  # rounds of the loop between a step and its checks
_WEIGHT: Final = "_simulation_weight"


class InvariantBroken(Exception):
    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text


def operation(weight: int) -> Callable[[Operation], Operation]:
    """Mark a method as an operation of its world. `weight` is how often it is drawn, relative to others."""

    def mark(method: Operation) -> Operation:
        setattr(method, _WEIGHT, weight)
        return method

    return mark


class Injected(Exception):
    """Base of injected errors. A module may log such an error, but no loop may end because of it."""


class InjectedError(Injected, OSError):
    """An injected error of a system call."""


def is_injected(error: BaseException | None) -> bool:
    """Return whether an injected error caused this error."""
    while error is not None:
        if isinstance(error, Injected) or isinstance(getattr(error, "orig", None), Injected):
            return True
        error = error.__cause__ or error.__context__
    return False


class World(ABC):
    """The world of one history. A subclass has a name, operations and invariants.

    Invariants in `always` are checked after each step, those in `at_rest` once all faults are over and nothing is in
    flight.
    """

    name: ClassVar[str]
    steps_max: ClassVar[int] = 40
    operations: ClassVar[dict[str, int]] = {}
    always: ClassVar[tuple[Invariant, ...]] = ()
    at_rest: ClassVar[tuple[Invariant, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.operations = {
            name: getattr(method, _WEIGHT)
            for each in reversed(cls.__mro__)
            for name, method in vars(each).items()
            if hasattr(method, _WEIGHT)
        }

    def __init__(self, random: Random, directory: Path, loop: SimulationLoop, clocks: Clocks) -> None:
        self.random = random
        self.directory = directory
        self.loop = loop
        self.clocks = clocks
        self.trace: list[str] = []
        self.steps = 0  # started steps
        self._loops: list[asyncio.Task[Any]] = []

    @abstractmethod
    async def start(self) -> None:
        """Assemble the modules."""

    @abstractmethod
    async def quiesce(self) -> None:
        """End all faults, and wait until nothing is in flight. The world limits how long that takes."""

    @abstractmethod
    async def stop(self) -> None:
        """End everything in order."""

    def record_event(self, what: str) -> None:
        """Add a line to the trace of this history."""
        self.trace.append(f"{self.loop.time():.3f} {what}")

    def start_loop(self, work: Awaitable[Any], name: str) -> "asyncio.Task[Any]":
        """Run a loop of the product that never ends by itself."""
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._loops.append(task)
        return task

    async def end_loops(self, loops: "list[asyncio.Task[Any]] | None" = None) -> None:
        """Cancel the loops that `start_loop` started, or only these."""
        loops = self._loops if loops is None else loops
        self._loops = [task for task in self._loops if task not in loops]
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)

    async def rounds(self) -> None:
        """Run everything that is due now."""
        for _ in range(ROUNDS):
            await asyncio.sleep(0)

    def check(self, invariants: tuple[Invariant, ...]) -> None:
        """Raise InvariantBroken for the first invariant that does not hold."""
        for invariant in (no_loop_has_ended, *invariants, no_exception_is_left):
            try:
                invariant(self)
            except AssertionError as error:
                text = str(error).splitlines()[0] if str(error) else describe(error, "assert")
                raise InvariantBroken(invariant.__name__, text) from error


def no_exception_is_left(world: World) -> None:
    """No exception reached the loop's handler, ended an unawaited task, or was logged as unexpected."""
    failures = world.loop.take_failures()
    assert not failures, " | ".join(failures)


def no_loop_has_ended(world: World) -> None:
    """Each loop lives as long as its process."""
    for task in world._loops:
        if task.done():
            error = None if task.cancelled() else task.exception()
            raise AssertionError(describe(error, f"loop {task.get_name()} has ended"))


class _ErrorLogHandler(logging.Handler):
    def __init__(self, loop: SimulationLoop) -> None:
        super().__init__(logging.ERROR)
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not is_injected(error):
            self._loop.failures.append(describe(error, f"logged: {record.getMessage()}"))


@contextmanager
def recording_logged_errors(loop: SimulationLoop) -> Iterator[None]:
    """Record errors that the product logs as its own defects. Drop all other log records."""
    root, ear = logging.getLogger(), _ErrorLogHandler(loop)
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [ear]
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
