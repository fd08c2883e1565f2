"""A commit runs once for all requests, outlives its clients, and keeps its result for repeated requests."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from kelvin.contracts.artifacts.push_api import CommitStep, Committed, Committing
from kelvin.contracts.errors import Conflict, Refused, Unavailable
from kelvin.contracts.traffic_errors import Overloaded
from snapshotter.intake.plan_record import PlanRecord
from snapshotter.push.commits import ABANDONED_S, MAX_RESULTS, MAX_RUNNING, Commits, digest_of_list
from snapshotter.push.publisher import Report
from tests.snapshotter.push.test_staging import record

DIGESTS = ("a" * 64,)
ANNOUNCED = digest_of_list(DIGESTS)
DONE = Committed(model="toy", version="0" * 64, created=True, total_bytes=1, new_chunks=1)


@dataclass
class Gate:
    """A publisher that waits for `go`, and counts its runs."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    began: int = 0
    cancelled: int = 0
    outcomes: list[Committed | Exception] = field(default_factory=list)

    async def publish(self, plan: PlanRecord, digests: tuple[str, ...], report: Report) -> Committed:
        self.began += 1
        report(CommitStep.SEALING)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        outcome = self.outcomes.pop(0) if self.outcomes else DONE
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def commits(gate: Gate) -> AsyncIterator[Commits]:
    commits = Commits(gate.publish)
    try:
        yield commits
    finally:
        await commits.close()
    assert not commits.is_running("acme")


async def test_commit_requests_join_one_run(gate: Gate, commits: Commits) -> None:
    """Many clients share one run. Each gets the step or the result within its wait, and can ask again later."""

    plan = record()
    assert await commits.try_join("acme", plan.plan_id, ANNOUNCED, 0) is None
    commits.start(plan, DIGESTS)
    await asyncio.sleep(0)
    assert await commits.try_join("acme", plan.plan_id, ANNOUNCED, 0) == Committing(step=CommitStep.SEALING)
    assert commits.is_running("acme")
    assert not commits.is_running("umbrella")
    names = (None, None, "other")
    clients = [asyncio.create_task(commits.try_join("acme", plan.plan_id, ANNOUNCED, 5, name)) for name in names]
    await asyncio.sleep(0)
    clients[0].cancel()
    gate.go.set()
    found = replace(DONE, created=False)  # one of the equal pushes created the version, and the others found it
    assert await asyncio.gather(*clients[1:]) == [DONE, found]
    for name, want in ((None, DONE), ("other", found), (None, DONE)):  # a client that lost its answer may ask again
        assert await commits.try_join("acme", plan.plan_id, ANNOUNCED, 0, name) == want
    assert gate.began == 1


async def test_other_tenants_see_no_commit(commits: Commits) -> None:
    """Another tenant sees no commit. A commit with other chunks is a conflict."""

    plan = record()
    commits.start(plan, DIGESTS)
    assert await commits.try_join("umbrella", plan.plan_id, ANNOUNCED, 0) is None
    with pytest.raises(Refused) as caught:
        await commits.try_join("acme", plan.plan_id, digest_of_list(("b" * 64,)), 0)
    assert isinstance(caught.value.failure, Conflict)


async def test_failed_commit_can_be_repeated(gate: Gate, commits: Commits) -> None:
    """After a failure the plan can be committed again."""

    plan = record()
    gate.outcomes = [Refused(Unavailable("the control plane"))]
    gate.go.set()
    commits.start(plan, DIGESTS)
    with pytest.raises(Refused, match="control plane"):
        await commits.try_join("acme", plan.plan_id, ANNOUNCED, 5)
    assert plan.plan_id not in commits
    commits.start(plan, DIGESTS)
    assert await commits.try_join("acme", plan.plan_id, ANNOUNCED, 5) == DONE


async def test_commits_and_results_are_bounded(gate: Gate, commits: Commits) -> None:
    """Running commits are bounded, and of old results the newest are kept."""

    plans = [record(f"tenant-{number}") for number in range(MAX_RUNNING)]
    for plan in plans:
        commits.start(plan, DIGESTS)
    with pytest.raises(Refused) as caught:
        commits.start(record("another"), DIGESTS)
    assert isinstance(caught.value.failure, Overloaded)
    gate.go.set()
    for plan in plans:
        await commits.try_join(plan.tenant, plan.plan_id, ANNOUNCED, 5)
    for _ in range(MAX_RESULTS):
        plan = record()
        commits.start(plan, DIGESTS)
        await commits.try_join("acme", plan.plan_id, ANNOUNCED, 5)
    assert repr(commits) == f"<Commits running=0 kept={MAX_RESULTS}>"
    assert plans[0].plan_id not in commits


async def test_kept_result_holds_no_list_of_chunks(gate: Gate, commits: Commits) -> None:
    """The list of a large version takes tens of megabytes, and many results are kept."""

    digests = tuple(f"{number:064x}" for number in range(3))
    held, plan = sys.getrefcount(digests), record()
    gate.go.set()
    commits.start(plan, digests)
    assert await commits.try_join("acme", plan.plan_id, digest_of_list(digests), 5) == DONE
    assert plan.plan_id in commits
    assert sys.getrefcount(digests) == held


async def test_tenant_with_many_commits_leaves_room_for_others(commits: Commits) -> None:
    """A tenant may run one commit, and further ones only up to the number that it leaves free.

    So it takes four tenants to fill the list.
    """

    def fill(tenant: str) -> int:
        """Start commits until one is refused. Return how many were started."""
        for number in range(MAX_RUNNING):
            try:
                commits.start(record(tenant), DIGESTS)
            except Refused:
                return number
        return MAX_RUNNING

    assert [fill(tenant) for tenant in ("a", "b", "c")] == [4, 2, 1]
    assert [fill(tenant) for tenant in ("a", "b", "c")] == [0, 0, 0]
    commits.start(record("victim"), DIGESTS)
    assert commits.is_running("victim")


async def test_closing_cancels_running_commits(gate: Gate, commits: Commits) -> None:
    """Closing cancels the running commits."""

    commits.start(record(), DIGESTS)
    await asyncio.sleep(0)
    await commits.close()
    assert (gate.began, gate.cancelled) == (1, 1)


@pytest.mark.virtual_time
async def test_abandoned_commit_is_cancelled() -> None:
    """A commit that no client waits for is cancelled, which frees the engine. The client can start it again."""
    gate, plan = Gate(), record()
    commits = Commits(gate.publish)
    commits.start(plan, DIGESTS)
    long_s = 2 * ABANDONED_S
    assert await commits.try_join("acme", plan.plan_id, ANNOUNCED, long_s) == Committing(step=CommitStep.SEALING)
    assert gate.cancelled == 0, "a client waited"
    await asyncio.sleep(long_s)
    assert gate.cancelled == 1
    assert await commits.try_join("acme", plan.plan_id, ANNOUNCED, 0) is None
    commits.start(plan, DIGESTS)
    await asyncio.sleep(long_s)
    assert gate.cancelled == 2
    assert await commits.try_join("acme", plan.plan_id, ANNOUNCED, 0) is None
    gate.go.set()
    commits.start(plan, DIGESTS)
    assert await commits.try_join("acme", plan.plan_id, ANNOUNCED, 5) == DONE
    await commits.close()
