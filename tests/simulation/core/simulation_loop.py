"""The event loop of a simulation: virtual time, no threads, and a record of all failures."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from operator import attrgetter
from typing import Any, Final

from tests.virtual_loop import VirtualLoop

BEGIN_S: Final = 1_000.0  # start of the monotonic clock
ROUNDS_MAX: Final = 20_000  # rounds of the loop without progress of time
EXECUTOR_S: Final = 0.0005  # duration of a call in a thread


class NoProgress(Exception):
    """The loop runs without progress of time."""


class SimulationLoop(VirtualLoop):
    """An event loop that runs blocking calls itself, after some virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self._skipping.now_s = BEGIN_S
        self.time = partial(attrgetter("now_s"), self._skipping)  # type: ignore[method-assign]  # called in each round
        self.failures: list[str] = []  # exceptions without a handler
        self.tasks: list[asyncio.Task[Any]] = []  # all tasks of the loop
        # The time until a call in a thread runs, and from there until its result arrives.
        self.executor_delay_s: Callable[[], tuple[float, float]] = lambda: (EXECUTOR_S, 0.0)
        self._at_s = 0.0
        self._rounds = 0
        self.set_exception_handler(self._record)
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """Run the call later on this loop."""
        future: asyncio.Future[Any] = self.create_future()
        before_s, behind_s = self.executor_delay_s()
        self.call_later(before_s, self._run, future, behind_s, func, args)
        return future

    def take_failures(self) -> list[str]:
        """Return the failures since the last call. They include tasks whose exception was never retrieved."""
        failures, self.failures = self.failures, []
        alive = []
        for task in self.tasks:
            if not task.done():
                alive.append(task)
            elif not task.cancelled() and getattr(task, "_log_traceback", False):
                failures.append(describe(task.exception(), f"task {task.get_name()}"))
        self.tasks = alive
        return failures

    def _run(
        self, future: "asyncio.Future[Any]", behind_s: float, func: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        if future.cancelled():  # a started thread goes on after a cancellation, another one does not start
            return
        try:
            result = func(*args)
        except BaseException as error:
            settle: Callable[[], None] = partial(future.set_exception, error)
        else:
            settle = partial(future.set_result, result)
        if behind_s:
            self.call_later(behind_s, self._settle, future, settle)
        else:
            settle()

    def _settle(self, future: "asyncio.Future[Any]", settle: Callable[[], None]) -> None:
        if not future.cancelled():
            settle()

    def _run_once(self) -> None:
        now_s = self._skipping.now_s
        if now_s != self._at_s:
            self._at_s, self._rounds = now_s, 0
        self._rounds += 1
        if self._rounds > ROUNDS_MAX:
            raise NoProgress(f"{ROUNDS_MAX} rounds of the loop at {now_s:.3f} s")
        super()._run_once()  # type: ignore[misc]

    def _record(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(describe(context.get("exception"), str(context.get("message"))))

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> "asyncio.Task[Any]":
        task = asyncio.Task(work, loop=loop, context=context)
        self.tasks.append(task)
        return task


def describe(error: BaseException | None, where: str) -> str:
    """Return a text with the failure and the product's function that raised it."""
    place = ""
    trace = None if error is None else error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/tests/" not in code.co_filename and "/lib/" not in code.co_filename:
            path = "/".join(code.co_filename.rsplit("/", 2)[-2:])
            place = f" in {path} {code.co_qualname}"
        trace = trace.tb_next
    return f"{where}: {error!r}{place}"
