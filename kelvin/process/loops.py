"""Run background loops: work that goes on as long as its owner lives. Every loop of a process is started here.

An exception that leaves a loop is a defect. It is logged and counted, and the loop is restarted with exponential
back-off. A process whose loop keeps failing is not ready: see `_Loop.is_failing` for the rule.

An unavailable dependency is not a defect. A loop should handle it and retry. If it doesn't, it is restarted all the
same, but the process stays ready. Work that ends by itself may be started here, too: it is restarted only after an
unexpected error.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from kelvin.contracts.backoff import ExponentialBackoff, should_log
from kelvin.contracts.errors import Refused

log = logging.getLogger(__name__)

T = TypeVar("T")
Body: TypeAlias = Callable[[], Coroutine[Any, Any, object]]

BACKOFF: Final = ExponentialBackoff(0.1, 10.0)
FAILING_AFTER: Final = 5  # errors in a row
ROUND_S: Final = 1.0  # errors of parts within this time of the first one count as one error in a row
STEADY_S: Final = 60.0  # after this time without an error, earlier errors no longer count
UNAVAILABLE: Final = (Refused, ConnectionError, TimeoutError)  # raised by calls to an unavailable dependency


class LoopHealth:
    """The loops of a process and their errors, for its metrics and its readiness probe."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()  # by the loop's name, since the process began
        self.loops: set[_Loop] = set()

    def __repr__(self) -> str:
        return f"<LoopHealth loops={len(self.loops)} errors={self.errors.total()} failing={list(self.failing())}>"

    def failing(self) -> tuple[str, ...]:
        """Return the names of the loops that keep the process from being ready."""
        return tuple(sorted({loop.name for loop in tuple(self.loops) if loop.is_failing()}))


PROCESS_HEALTH: Final = LoopHealth()
_running: Final[ContextVar["_Loop | None"]] = ContextVar("running loop", default=None)


def record_error(error: Exception, about: object) -> None:
    """Record an unexpected error in one part of a loop's work. The loop goes on with the other parts. `about` names the
    part in the log. The error counts for the running loop; outside of a loop it is only logged.
    """
    loop = _running.get()
    if loop is None:
        log.error("one part of the work failed; the others go on", exc_info=error, extra={"about": str(about)})
    else:
        loop.record_part(error, about)


@contextmanager
def contain_errors(about: object) -> Iterator[None]:
    """Record an unexpected error in this part of a loop's work, and go on. See `record_error`."""
    try:
        yield
    except Exception as error:
        record_error(error, about)


async def run_every(interval_s: float, call: Callable[[], Awaitable[None]]) -> None:
    """Call `call` every `interval_s` seconds, first after one interval, until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        await call()


def notify(listeners: Iterable[T], call: Callable[[T], object]) -> None:
    """Call `call` with each listener. An error of one does not stop the others."""
    for listener in tuple(listeners):
        with contain_errors(listener):
            call(listener)


def ready_while_loops_work(app: ASGIApp, health: LoopHealth = PROCESS_HEALTH) -> ASGIApp:
    """Wrap an application: while loops keep failing, `/readyz` answers 503 and names them."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/readyz" and (failing := health.failing()):
            body = f"background loops keep failing: {', '.join(failing)}; the log says why\n".encode()
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await app(scope, receive, send)

    return guarded


class Loops:
    """Owns background loops. Leaving the `async with` block cancels them and waits for them."""

    def __init__(self, health: LoopHealth = PROCESS_HEALTH) -> None:
        self._health = health
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Loops {sorted(task.get_name() for task in self._tasks)}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(
        self,
        name: str,
        body: Body,
        *,
        about: object = "",
        takes_readiness: bool = True,
    ) -> asyncio.Task[None]:
        """Run `body` until it returns, and again after each unexpected error. Cancel the task to end it earlier.

        `name` is a metric label, so take it from a small fixed set; `about` distinguishes loops of one name in the log.
        Pass `takes_readiness=False` for a loop of one version or tenant: its defect must not make the process unready
        for all others.
        """
        loop = _Loop(name, f"{name} {about}".rstrip(), self._health, takes_readiness)
        task = asyncio.get_running_loop().create_task(loop.run(body), name=loop.title)
        if self._closed:
            task.cancel()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Return once every loop has ended. Cancelling the caller cancels no loop."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel all loops and wait until they have ended. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await self.wait()


class _Loop:
    def __init__(self, name: str, title: str, health: LoopHealth, takes_readiness: bool) -> None:
        self.name = name
        self.title = title  # name and `about`
        self._health = health
        self._takes_readiness = takes_readiness
        self._errors_in_a_row = 0
        self._is_unavailable = False  # the last error was one of UNAVAILABLE
        self._round_began_s: float | None = None  # when an error of a part was last counted
        self._sound_since_s: float | None = None  # None while it waits for its restart
        self._now_s = asyncio.get_running_loop().time

    def is_failing(self) -> bool:
        """Return whether it failed FAILING_AFTER times and has not yet run for STEADY_S without an error."""
        has_failed = self._errors_in_a_row >= FAILING_AFTER and not self._is_steady()
        return has_failed and self._takes_readiness and not self._is_unavailable

    async def run(self, body: Body) -> None:
        self._health.loops.add(self)
        _running.set(self)
        try:
            while not await self._try(body):
                luck = random.random()  # noqa: S311 (spreads load, keeps no secret)
                await asyncio.sleep(BACKOFF.delay_s(self._errors_in_a_row, luck))
        finally:
            self._health.loops.discard(self)

    async def _try(self, body: Body) -> bool:
        """Run the body once. Return whether it returned without an error."""
        self._sound_since_s = self._now_s()
        try:
            await body()
            return True
        except (asyncio.CancelledError, Exception) as error:
            # Only a cancelled task ends. A CancelledError may also come from another awaitable of the body, and the
            # clean-up of a cancelled body may raise another error.
            task = asyncio.current_task()
            is_ending = task is None or task.cancelling() > 0
            if not is_ending or not isinstance(error, asyncio.CancelledError):
                self._record(error)
            if is_ending:
                raise asyncio.CancelledError from error
        return False

    def _record(self, error: BaseException) -> None:
        self._count(error)
        self._sound_since_s = None
        self._log("a background loop failed", error, loop=self.title)

    def record_part(self, error: Exception, about: object) -> None:
        """Count an error that does not end the body."""
        now_s = self._now_s()
        if self._round_began_s is not None and now_s - self._round_began_s < ROUND_S:
            self._health.errors[self.name] += 1
            self._is_unavailable = self._is_unavailable and isinstance(error, UNAVAILABLE)
        else:
            self._count(error)
            self._round_began_s = now_s
        self._sound_since_s = now_s
        self._log("a background loop goes on without a part of its work", error, loop=self.name, about=str(about))

    def _count(self, error: BaseException) -> None:
        self._errors_in_a_row = 1 if self._is_steady() else self._errors_in_a_row + 1
        self._is_unavailable = isinstance(error, UNAVAILABLE)
        self._health.errors[self.name] += 1

    def _log(self, text: str, error: BaseException, **fields: str) -> None:
        if should_log(self._errors_in_a_row):
            log.error(text, exc_info=error, extra={**fields, "errors_in_a_row": self._errors_in_a_row})

    def _is_steady(self) -> bool:
        return self._sound_since_s is not None and self._now_s() - self._sound_since_s >= STEADY_S
