"""The front door is changed for another process: begun beside the old one on the same socket, which then ends."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kelvin.supervisor.child_group import KILL_AFTER_S, POLL_S, Child, ChildGroup

log = logging.getLogger(__name__)

OUTCOME_FILE: Final = "succession"  # in the run directory: why the last one came to nothing


class HotRestart:
    """Of one supervisor's group; at most one is under way."""

    def __init__(
        self,
        group: ChildGroup,
        may_begin: Callable[[], Awaitable[bool]],
        is_serving: Callable[[Child], Awaitable[bool]],
        run: Path,
        ready_s: float,
        drain_s: float,
    ) -> None:
        """`is_serving` says whether this very process answers there, and is ready. A new door has `ready_s` for that,
        the old one `drain_s` to end. `run` is the run directory.
        """
        self._group = group
        self._may_begin = may_begin
        self._is_at_door = is_serving
        self._run = run
        self._outcome = run / OUTCOME_FILE
        self._ready_s = ready_s
        self._drain_s = drain_s
        self._task: asyncio.Task[None] | None = None
        self._is_ordered = False

    def __repr__(self) -> str:
        return f"<HotRestart under_way={self.is_under_way}>"

    @property
    def is_under_way(self) -> bool:
        """Whether two doors are there, or will be."""
        return self._task is not None and not self._task.done()

    def begin(self) -> None:
        """Where one is under way, another one follows: whoever orders it may have seen the new door as the old one."""
        self._is_ordered = True
        if not self.is_under_way:
            self._task = asyncio.get_running_loop().create_task(self._follow(), name="succession")

    def cancel(self) -> None:
        """Whoever runs is ended with all others."""
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        while self._is_ordered:
            self._is_ordered = False
            try:
                await self._replace_activator()
            except OSError as error:  # such as a file system without links to sockets
                self._failed(f"the door can't be changed: {error.strerror or error}")

    async def _replace_activator(self) -> None:
        old = next(child for child in self._group.members if child.spec.listens)
        name = old.spec.name
        if not await self._may_begin():
            self._failed(f"the {name} can't be changed before the installation is ready")
            return
        with self._saved_socket(old) as restore_socket:
            new = Child(old.spec, is_restarted=False)
            try:
                self._group.start(new)
            except OSError as error:
                self._failed(f"the new {name} can't be started, and the old one stays: {error.strerror or error}")
                return
            limit = time.monotonic() + self._ready_s
            # If it dies right after its answer, keep the old one: nobody else would accept requests.
            while not (await self._is_at_door(new) and new.pid is not None):
                if new.pid is None or time.monotonic() > limit:
                    await self._group.end([new], KILL_AFTER_S)
                    restore_socket()
                    self._failed(
                        f"the new {name} did not become ready, and the old one stays; logs/{name}.log says why"
                    )
                    return
                await asyncio.sleep(POLL_S)
        new.is_restarted, old.is_restarted = True, False
        if old.pid is None:  # it died meanwhile
            self._group.members.remove(old)
            return
        await self._group.end([old], self._drain_s, signal.SIGUSR1)

    @contextmanager
    def _saved_socket(self, old: Child) -> Iterator[Callable[[], None]]:
        """Yield a function that gives the old process's socket its name back.

        A second link keeps the socket reachable while the new process has the name.
        """
        assert old.spec.socket is not None
        name, pid = self._run / old.spec.socket, old.pid
        kept = name.with_name(f".{name.name}.kept")
        kept.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # the old process died or was never ready
            os.link(name, kept)

        def restore_socket() -> None:
            if old.pid != pid:  # it died, and its replacement takes the name itself
                return
            with suppress(FileNotFoundError):
                kept.rename(name)

        try:
            yield restore_socket
        finally:
            kept.unlink(missing_ok=True)

    def _failed(self, reason: str) -> None:
        """Said to whoever asked for it, who may be gone."""
        log.error("the door was not changed", extra={"reason": reason})
        try:
            self._outcome.write_text(reason + "\n")
        except OSError as error:
            log.warning("nobody can be told", extra={"error": repr(error)})
