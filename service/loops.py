"""Start background loops. This is the one way to run something for as long as a process, or its owner, lives.

A loop that raises is a defect. It is logged, counted and started again with exponential back-off, so a defect neither
ends the loop for good nor takes the process along. While a loop keeps failing the process is not ready: see
`_Loop.is_failing` for the rule.

A dependency that is away is no defect: the loop itself has to expect that, wait and ask again. So it never takes
readiness. Work that ends by itself is not a loop: it belongs to a task with an owner that waits for it.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from starlette.types import ASGIApp, Receive, Scope, Send

from contracts.doubling import Doubling, is_told
from contracts.errors import Refused

log = logging.getLogger(__name__)

Body: TypeAlias = Callable[[], Coroutine[Any, Any, object]]

BACKOFF: Final = Doubling(0.1, 10.0)
FAILING_AFTER: Final = 5  # errors in a row
ROUND_S: Final = 1.0  # errors of several parts within it are of one round
STEADY_S: Final = 60.0  # without an error: the loop works again, and earlier errors no longer count
# What a call raises whose other end is away. The loop should have expected it, but the process is as ready as before.
AWAY: Final = (Refused, ConnectionError, TimeoutError)


class LoopHealth:
    """What a process tells of its loops: in its metrics, and in its answer to a readiness probe."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()  # unexpected ones since the process began, by the loop's name
        self.loops: set[_Loop] = set()

    def __repr__(self) -> str:
        return f"<LoopHealth loops={len(self.loops)} errors={self.errors.total()} failing={list(self.failing())}>"

    def failing(self) -> tuple[str, ...]:
        """Return the names of the loops that keep the process from being ready."""
        return tuple(sorted({loop.name for loop in tuple(self.loops) if loop.is_failing()}))


PROCESS: Final = LoopHealth()


_running: Final[ContextVar["_Loop | None"]] = ContextVar("running loop", default=None)


def record_error(error: Exception, about: object) -> None:
    """Record an unexpected error in one of several things that the running loop looks after, and go on with the others.

    It is logged, and counts as an error of the loop, which is not started again. `about` says which thing it was. What
    is called outside of a loop only logs.
    """
    loop = _running.get()
    if loop is None:
        log.error("one of several failed; the others go on", exc_info=error, extra={"about": str(about)})
    else:
        loop.record_part(error, about)


def ready_while_loops_work(app: ASGIApp, health: LoopHealth = PROCESS) -> ASGIApp:
    """Return the application with one change: `/readyz` is 503, and names the loops, while loops keep failing."""

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
    """Own some loops of one event loop: leaving the `async with` block, or `close`, cancels them and waits for them."""

    def __init__(self, health: LoopHealth = PROCESS) -> None:
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
        steady_s: float = STEADY_S,
    ) -> asyncio.Task[None]:
        """Run `body` until it returns, again after each unexpected error. Cancel the task to end it sooner.

        `name` is a metric's label, so it comes from a small fixed set; `about` says which of several loops of that name
        this is. Pass `takes_readiness=False` for a loop that serves one tenant's version: its defect must not take the
        process away from all others. `steady_s` is for loops that act less often than once in STEADY_S seconds.
        """
        title = f"{name} {about}".rstrip()
        loop = _Loop(name, self._health, takes_readiness, steady_s)
        task = asyncio.get_running_loop().create_task(loop.run(title, body), name=title)
        if self._closed:
            task.cancel()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Return once every loop has ended. Loops go on where the caller is cancelled."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel all loops and wait until they have ended. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await self.wait()


class _Loop:
    """A running loop, and how it fares."""

    def __init__(self, name: str, health: LoopHealth, takes_readiness: bool, steady_s: float) -> None:
        self.name = name
        self._health = health
        self._takes_readiness = takes_readiness
        self._steady_s = steady_s
        self._errors_in_a_row = 0
        self._is_away = False  # the last error was one of AWAY
        self._part_s: float | None = None  # when a part of its work failed last
        self._began_s: float | None = None  # None: it waits to be started again
        self._now_s = asyncio.get_running_loop().time

    def is_failing(self) -> bool:
        """Return whether it failed FAILING_AFTER times, and has not since run for `steady_s` without an error."""
        has_failed = self._errors_in_a_row >= FAILING_AFTER and not self._is_steady()
        return has_failed and self._takes_readiness and not self._is_away

    async def run(self, title: str, body: Body) -> None:
        self._health.loops.add(self)
        _running.set(self)
        try:
            while not await self._try(title, body):
                luck = random.random()  # noqa: S311 (spreads load, keeps no secret)
                await asyncio.sleep(BACKOFF.after(self._errors_in_a_row, luck))
        finally:
            self._health.loops.discard(self)

    async def _try(self, title: str, body: Body) -> bool:
        """Return whether the body came to its own end."""
        self._began_s = self._now_s()
        try:
            await body()
            return True
        except asyncio.CancelledError as error:
            # Only a cancelled task may end so. Something that the body awaits may have been cancelled instead.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            self._record(title, error)
        except Exception as error:
            self._record(title, error)
        return False

    def record_part(self, error: Exception, about: object) -> None:
        """Count an error that does not end the body. Several of one round are one in the row."""
        now_s = self._now_s()
        if self._part_s is not None and now_s - self._part_s < ROUND_S:
            self._health.errors[self.name] += 1
        else:
            self._count(error)
        self._part_s = self._began_s = now_s  # it is steady once it goes on without an error from here
        if is_told(self._errors_in_a_row):
            log.error(
                "a background loop goes on without a part of its work",
                exc_info=error,
                extra={"loop": self.name, "about": str(about), "errors_in_a_row": self._errors_in_a_row},
            )

    def _count(self, error: BaseException) -> None:
        self._errors_in_a_row = 1 if self._is_steady() else self._errors_in_a_row + 1
        self._is_away = isinstance(error, AWAY)
        self._health.errors[self.name] += 1

    def _record(self, title: str, error: BaseException) -> None:
        self._count(error)
        self._began_s = None
        if is_told(self._errors_in_a_row):
            log.error(
                "a background loop failed and is started again",
                exc_info=error,
                extra={"loop": title, "errors_in_a_row": self._errors_in_a_row},
            )

    def _is_steady(self) -> bool:
        return self._began_s is not None and self._now_s() - self._began_s >= self._steady_s
