"""The reason why a version does not start is in the status and in the feed, until a replica serves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from controlplane.api.types.admin_types import ReplicaDeath
from controlplane.knative.policy.rollout_waves import ImageBehind
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.registry import Registry
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.policy.start_problem import crash_loop
from controlplane.scaling.replicas import Replica, ReplicaTable
from controlplane.scaling.start_outcomes import StartOutcomes
from controlplane.status.model_status import model_status
from controlplane.tasks import Tasks
from kelvin.contracts.accounting.usage import LifetimeRecord
from kelvin.contracts.errors import Unavailable
from kelvin.contracts.problem import from_wire, to_wire
from kelvin.contracts.serving.control_messages import StartProblem
from kelvin.contracts.wire import encode
from tests.controlplane.builders import BY, NOW_S, TENANT, digest, key, opened_registry, registration

VERSION = (TENANT, "m", digest("a"))


@asynccontextmanager
async def outcomes_of(data: Path) -> AsyncIterator[tuple[StartOutcomes, FeedHub, Registry]]:
    feed = FeedHub()
    async with opened_registry(data, feed) as registry, Tasks() as tasks:
        await registry.register(registration(), NOW_S)
        yield StartOutcomes(registry, feed, tasks), feed, registry


def lifetime(exit_status: int) -> LifetimeRecord:
    """Return the lifetime record of a process that ran the version and ended with this status."""
    return LifetimeRecord(
        runtime_id="r1", source="s", sequence=1, pid=1, tenant=TENANT, model="m", version=digest("a"), device_class="c",
        born_at_us=1, died_at_us=2, total_us=1, standby_us=0, restore_us=1, active_us=0, idle_us=0, requests=0,
        exit_status=exit_status, cpu_us=0, max_rss_kb=0,
    )  # fmt: skip


def problems(feed: FeedHub) -> dict[tuple[str, str, str], StartProblem]:
    """Return the start problems that a new reader of the feed receives."""
    return {(row.tenant, row.model, row.version): row.problem for row in feed.snapshot().start_problems}


async def test_start_problem_lasts_until_a_replica_serves(tmp_path: Path) -> None:
    """A failed start is shown with its code and message. The first ready replica removes it from both places."""

    async with outcomes_of(tmp_path) as (outcomes, feed, registry):
        failure = from_wire(to_wire(Unavailable("the weight cache")))
        outcomes.on_start_failed(key(), failure)
        status = model_status(registry.model(TENANT, "m"), ReplicaTable(1), outcomes)
        assert status.versions[0].start_problem == problems(feed)[VERSION]
        assert problems(feed)[VERSION].reason == "failed"
        assert problems(feed)[VERSION].message == f"unavailable: {failure.message}"
        outcomes.on_replica_ready(Replica("r1", ReplicaState.READY, 0, key=key()))
        assert problems(feed) == {}
        assert outcomes.problem(key()) is None


async def test_status_says_why_a_version_is_behind(tmp_path: Path) -> None:
    """The JSON has `image_behind`: null for a version on the current image, otherwise the reason."""

    async with outcomes_of(tmp_path) as (outcomes, _, registry):
        (shown,) = model_status(registry.model(TENANT, "m"), ReplicaTable(1), outcomes).versions
        assert encode(shown).endswith(b',"image_behind":null}')
        outcomes.images_behind = {key(): ImageBehind(reason="failed", message="it did not start", since_s=12)}
        (shown,) = model_status(registry.model(TENANT, "m"), ReplicaTable(1), outcomes).versions
        expected = b'{"reason":"failed","message":"it did not start","since_s":12}'
        assert encode(shown).endswith(b',"image_behind":' + expected + b"}")


async def test_start_problem_is_published_again_after_a_deletion(tmp_path: Path) -> None:
    """The version is deleted, pushed again, and fails to start for the same reason."""

    async with outcomes_of(tmp_path) as (outcomes, feed, registry):
        await registry.register(registration(letter="b"), NOW_S)
        await registry.deploy(BY, TENANT, "m", digest("b"), NOW_S)
        outcomes.on_start_failed(key(), Unavailable("the zygote"))
        await registry.delete(BY, TENANT, "m", digest("a"), NOW_S, lambda _: False)
        assert (outcomes.problem(key()), problems(feed)) == (None, {})
        await registry.register(registration(), NOW_S)
        outcomes.on_start_failed(key(), Unavailable("the zygote"))
        assert problems(feed)[VERSION] == outcomes.problem(key())


async def test_crash_loop_names_the_last_exit_status(tmp_path: Path) -> None:
    """The lifetime record may arrive before or after the start is given up."""

    async with outcomes_of(tmp_path) as (outcomes, feed, _):
        outcomes.on_start_failed(key(), crash_loop())
        assert problems(feed)[VERSION].exit_status is None
        outcomes.record_exits([lifetime(-9)])
        assert problems(feed)[VERSION].exit_status == -9
        assert "signal 9 (SIGKILL)" in problems(feed)[VERSION].message
        outcomes.record_exits([lifetime(3), lifetime(0)])
        outcomes.on_start_failed(key(), crash_loop())
        assert problems(feed)[VERSION].exit_status == 3


@pytest.mark.parametrize(
    ("state", "is_shown"),
    [
        pytest.param(ReplicaState.READY, True, id="a serving replica"),
        pytest.param(ReplicaState.ASLEEP, True, id="a sleeping replica"),
        pytest.param(ReplicaState.DRAINING, False, id="not a draining replica"),
        pytest.param(ReplicaState.ENDING, False, id="not an ending replica"),
    ],
)
async def test_replica_that_ends_unexpectedly_is_in_status(tmp_path: Path, state: ReplicaState, is_shown: bool) -> None:
    """The last death stays in the status while another replica serves. Its exit status is in the lifetime record."""
    async with outcomes_of(tmp_path) as (outcomes, _, registry):
        outcomes.on_replica_lost(Replica("r1", state, 0, key=key()))
        outcomes.record_exits([lifetime(-9), lifetime(-9)])
        outcomes.on_replica_ready(Replica("r2", ReplicaState.READY, 0, key=key()))
        (shown,) = model_status(registry.model(TENANT, "m"), ReplicaTable(1), outcomes).versions
        assert shown.last_death == (ReplicaDeath("r1", 0, -9) if is_shown else None)


async def test_deleting_version_removes_its_start_problem(tmp_path: Path) -> None:
    """The start problem is gone from the feed, and a start that was still running adds none."""

    async with outcomes_of(tmp_path) as (outcomes, feed, registry):
        outcomes.on_start_failed(key(), Unavailable("the zygote"))
        await registry.delete_model(BY, TENANT, "m", NOW_S, lambda _: False, force=True)
        assert problems(feed) == {}
        outcomes.on_start_failed(key(), Unavailable("the zygote"))  # its start was still running
        assert problems(feed) == {}


async def test_records_of_deleted_versions_are_dropped(tmp_path: Path) -> None:
    """The next outcome of any version drops them, so memory does not grow with deleted models."""
    async with outcomes_of(tmp_path) as (outcomes, _, registry):
        outcomes.on_replica_lost(Replica("r1", ReplicaState.READY, 0, key=key()))
        outcomes.record_exits([lifetime(-9)])
        outcomes.on_start_failed(key(), Unavailable("the zygote"))
        await registry.delete_model(BY, TENANT, "m", NOW_S, lambda _: False, force=True)
        outcomes.on_replica_ready(Replica("r2", ReplicaState.READY, 0, key=key("other")))
        assert (outcomes.last_attempt(key()), outcomes.last_death(key())) == (None, None)
