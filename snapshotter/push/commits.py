"""Run commits of pushes independently of the requests that start them.

A repeated request joins its commit or gets its result. A commit without a waiting request for ABANDONED_S is cancelled:
its client disconnected, or its tenant was suspended. A client that retries starts it again, from what is stored by
then.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from blake3 import blake3
from msgspec.structs import replace

from kelvin.contracts.artifacts.push_api import CommitStep, Committed, Committing
from kelvin.contracts.errors import Conflict, Refused
from kelvin.contracts.traffic_errors import Overloaded
from snapshotter.intake.plan_record import PlanRecord
from snapshotter.push.publisher import Report

log = logging.getLogger(__name__)

MAX_RUNNING: Final = 8
MAX_RESULTS: Final = 256
ABANDONED_S: Final = 60.0  # clients poll every few seconds

Publish = Callable[[PlanRecord, tuple[str, ...], Report], Coroutine[Any, Any, Committed]]


@dataclass(slots=True)
class _Commit:
    tenant: str
    list_digest: str  # see `digest_of_list`
    client: str | None  # the client that started it
    step: CommitStep = CommitStep.WAITING
    task: asyncio.Task[Committed] = field(init=False)
    waiter_count: int = 0  # how many requests wait for it
    abandonment: asyncio.TimerHandle | None = None  # runs while no request waits

    def report(self, step: CommitStep) -> None:
        self.step = step

    async def join(self, wait_s: float) -> bool:
        """Wait until the commit ends, for at most `wait_s`. Return whether it ended."""
        self._stop_timer()
        self.waiter_count += 1
        try:
            done, _ = await asyncio.wait({self.task}, timeout=wait_s)
        finally:
            self.waiter_count -= 1
            self.start_abandon_timer()
        return bool(done)

    def result(self, client: str | None) -> Committed:
        """Return the result, or raise the commit's failure.

        Equal concurrent pushes share a commit. Its starter always gets the answer that its push created the version;
        the other clients get the answer that the version existed.
        """
        committed = self.task.result()
        return committed if client == self.client else replace(committed, created=False, restored=False)

    def start_abandon_timer(self) -> None:
        """Cancel the commit after ABANDONED_S, unless a request joins it or it ends before that."""
        if not self.waiter_count and not self.task.done():
            self._stop_timer()
            self.abandonment = asyncio.get_running_loop().call_later(ABANDONED_S, self.task.cancel)

    def _stop_timer(self) -> None:
        if self.abandonment is not None:
            self.abandonment.cancel()
            self.abandonment = None


class Commits:
    """The running commits, at most MAX_RUNNING. Its owner must close it: that cancels commits, and a retry resumes
    them.

    Beyond its first commit a tenant may run at most as many as it leaves free (dynamic thresholds, see
    `activator/limits/concurrency_limits.py`). One tenant alone gets half of the places; four tenants can fill them.
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._commits: OrderedDict[str, _Commit] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Commits running={len(self._running())} kept={len(self._commits)}>"

    def __contains__(self, plan_id: str) -> bool:
        return plan_id in self._commits

    def is_running(self, tenant: str) -> bool:
        """Return whether a commit of this tenant runs."""
        return any(commit.tenant == tenant for commit in self._running())

    async def try_join(
        self, tenant: str, plan_id: str, list_digest: str, wait_s: float, client: str | None = None
    ) -> Committed | Committing | None:
        """Return the result of the plan's commit, or its step after `wait_s`; None if there is none or it was
        cancelled.

        `list_digest` is the `digest_of_list` of the caller's chunks. Raises the commit's failure once (the next call
        starts it again), and `Refused(Conflict)` if the plan is being committed with other chunks.
        """
        commit = self._commits.get(plan_id)
        if commit is None or commit.tenant != tenant:
            return None
        if commit.list_digest != list_digest:
            raise Refused(Conflict("commit", "the plan is being committed with other chunks"))
        if not await commit.join(wait_s):
            return Committing(step=commit.step)
        failed = commit.task.cancelled() or commit.task.exception() is not None
        if failed and self._commits.get(plan_id) is commit:
            del self._commits[plan_id]
        return None if commit.task.cancelled() else commit.result(client)

    def start(self, record: PlanRecord, digests: tuple[str, ...], client: str | None = None) -> None:
        """Start the commit of a plan for `client`. The plan must have none. Raises `Refused(Overloaded)`."""
        assert record.plan_id not in self._commits
        running = self._running()
        tenant_count, free_count = sum(each.tenant == record.tenant for each in running), MAX_RUNNING - len(running)
        if tenant_count >= free_count:
            raise Refused(Overloaded("the list of running commits", MAX_RUNNING, 5.0))
        commit = _Commit(record.tenant, digest_of_list(digests), client)
        commit.task = asyncio.create_task(
            self._publish(record, digests, commit.report), name=f"commit {record.plan_id}"
        )
        commit.task.add_done_callback(_log_failure)
        commit.start_abandon_timer()
        self._commits[record.plan_id] = commit
        self._forget_old()

    def forget(self, plan_id: str) -> None:
        """Drop a finished commit, because the plan is pushed again. A running commit stays."""
        commit = self._commits.get(plan_id)
        if commit is not None and commit.task.done():
            del self._commits[plan_id]

    async def close(self) -> None:
        """Cancel running commits and wait until they have ended."""
        tasks = [commit.task for commit in self._running()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _running(self) -> list[_Commit]:
        return [commit for commit in self._commits.values() if not commit.task.done()]

    def _forget_old(self) -> None:
        done = [plan_id for plan_id, commit in self._commits.items() if commit.task.done()]
        for plan_id in done[: max(0, len(self._commits) - MAX_RESULTS)]:
            del self._commits[plan_id]


def digest_of_list(digests: Iterable[str]) -> str:
    """Return the digest of a list of chunks. It is kept instead of the list, which may take 80 MB."""
    return blake3(",".join(digests).encode()).hexdigest()


def _log_failure(task: asyncio.Task[Committed]) -> None:
    """Log a failure. This also marks the exception as retrieved, since the client may never ask."""
    if task.cancelled():
        return
    match task.exception():
        case None:
            return
        case Refused() as refused:
            log.warning("a commit was refused", extra={"task": task.get_name(), "failure": str(refused)})
        case error:
            log.error("a commit failed", exc_info=error, extra={"task": task.get_name()})
