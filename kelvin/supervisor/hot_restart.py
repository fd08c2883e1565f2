"""Hot restart of the activator: start a new process on the same socket, then drain the old one."""

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

OUTCOME_FILE: Final = "succession"  # in the run directory: why the last hot restart failed


class HotRestart:
    """Hot restarts of one supervisor's activator. At most one runs at a time."""

    def __init__(
        self,
        group: ChildGroup,
        may_begin: Callable[[], Awaitable[bool]],
        is_serving: Callable[[Child], Awaitable[bool]],
        run: Path,
        ready_s: float,
        drain_s: float,
    ) -> None:
        """`is_serving` returns whether this process answers on the socket and is ready. The new process has `ready_s`
        to become ready, the old one `drain_s` to end. `run` is the run directory.
        """
        self._group = group
        self._may_begin = may_begin
        self._is_serving = is_serving
        self._run = run
        self._outcome = run / OUTCOME_FILE
        self._ready_s = ready_s
        self._drain_s = drain_s
        self._task: asyncio.Task[None] | None = None
        self._is_ordered = False

    def __repr__(self) -> str:
        return f"<HotRestart under_way={self.is_running}>"

    @property
    def is_running(self) -> bool:
        """Whether a hot restart runs, with up to two activators."""
        return self._task is not None and not self._task.done()

    def begin(self) -> None:
        """Start a hot restart. If one runs, another follows: the caller may have taken the new process for the old."""
        self._is_ordered = True
        if not self.is_running:
            self._task = asyncio.get_running_loop().create_task(self._run_ordered(), name="succession")

    def cancel(self) -> None:
        """Cancel a running hot restart. The supervisor then ends both activators with the rest of the group."""
        if self._task is not None:
            self._task.cancel()

    async def _run_ordered(self) -> None:
        while self._is_ordered:
            self._is_ordered = False
            try:
                await self._replace_activator()
            except OSError as error:  # such as a file system that refuses links to sockets
                self._report_failure(f"the activator can't be restarted: {error.strerror or error}")

    async def _replace_activator(self) -> None:
        old = next(child for child in self._group.members if child.spec.listens)
        name = old.spec.name
        if not await self._may_begin():
            self._report_failure(f"the {name} can't be restarted before the installation is ready")
            return
        with self._saved_socket(old) as restore_socket:
            new = Child(old.spec, is_restarted=False)
            try:
                self._group.start(new)
            except OSError as error:
                self._report_failure(
                    f"the new {name} can't be started, and the old one stays: {error.strerror or error}"
                )
                return
            limit = time.monotonic() + self._ready_s
            # If it dies right after its answer, keep the old one: no other process would accept requests.
            while not (await self._is_serving(new) and new.pid is not None):
                if new.pid is None or time.monotonic() > limit:
                    await self._group.end([new], KILL_AFTER_S)
                    restore_socket()
                    self._report_failure(
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
        """Yield a function that gives the socket name back to the old process. A second link keeps the old socket
        reachable while the new process has the name.
        """
        assert old.spec.socket is not None
        name, pid = self._run / old.spec.socket, old.pid
        saved_name = name.with_name(f".{name.name}.kept")
        saved_name.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # the old process died or was never ready
            os.link(name, saved_name)

        def restore_socket() -> None:
            if old.pid != pid:  # the old process died, and its restarted process takes the name itself
                return
            with suppress(FileNotFoundError):
                saved_name.rename(name)

        try:
            yield restore_socket
        finally:
            saved_name.unlink(missing_ok=True)

    def _report_failure(self, reason: str) -> None:
        """Log the failure and write it to the outcome file for the command that ordered the restart."""
        log.error("the activator was not restarted", extra={"reason": reason})
        try:
            self._outcome.write_text(reason + "\n")
        except OSError as error:
            log.warning("the outcome can't be written", extra={"error": repr(error)})
