"""Collections interleaved with pushes and deletions in any way: no named version ever lacks a byte."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kelvin.contracts.errors import Refused
from snapshotter.push.publisher import Publisher, RunningCommit
from snapshotter.push.staging import Staging
from tests.snapshotter.gated import World, inline
from tests.snapshotter.models import Model, Weight, default_weights, weight
from tests.snapshotter.tensors_files import KeptModel

AT_ONCE = 3


def model(number: int) -> Model:
    """Return a model that shares some tensors, and so chunks, with the others, but no pack."""
    shared = {name: each for name, each in default_weights().items() if "embed" in name}
    own: dict[str, Weight] = {f"model.part.{number}": weight((1100,), number)}
    common = {"model.part.common": weight((1500,), 99)} if number else {}
    return Model(shards={"model.safetensors": shared | own | common})


# The last model is a kept file. It shares chunks with the second model.
MODELS = [model(0), model(1), KeptModel(shards=model(2).shards)]


class Collecting(RuleBasedStateMachine):
    """Pushes, collections, deletions and waits in any order and interleaving."""

    publisher: type[Publisher] = Publisher
    staging: type[Staging] = Staging

    @initialize(grace_s=st.sampled_from([0, 100]))
    def open(self, grace_s: float) -> None:
        self.data = Path(tempfile.mkdtemp(prefix="kelvin-collect-"))
        self.world = World(self.data, grace_s, self.publisher, self.staging)

    @rule(which=st.integers(0, len(MODELS) - 1))
    def push(self, which: int) -> None:
        if sum(not task.done() for task in self.world.clients) < AT_ONCE:
            self.world.push(MODELS[which])

    @rule()
    def collect(self) -> None:
        if all(task.done() for task in self.world.collections):
            self.world.collect()

    @rule(which=st.integers(0, 99), steps=st.integers(1, 12))
    def step(self, which: int, steps: int) -> None:
        for _ in range(steps):
            self.world.step(which)
            self.world.check()

    @rule()
    def finish(self) -> None:
        self.world.finish()

    @precondition(lambda self: self.world.jobs.named_versions)
    @rule(which=st.integers(0, 2))
    def delete(self, which: int) -> None:
        versions = sorted(self.world.jobs.named_versions)
        self.world.jobs.named_versions.discard(versions[which % len(versions)])

    @rule(by_s=st.sampled_from([1, 60, 200]))
    def wait(self, by_s: float) -> None:
        self.world.now_s += by_s

    @invariant()
    def named_versions_are_whole(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.finish(lambda number: number * 7)
            self.world.check()
        finally:
            self.world.close()
            shutil.rmtree(self.data)


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "to_thread", inline)


def run(machine: type[RuleBasedStateMachine], **more: Any) -> None:
    quiet = list(HealthCheck)
    run_state_machine_as_test(machine, settings=settings(deadline=None, suppress_health_check=quiet, **more))


def test_no_named_version_ever_lacks_a_chunk() -> None:
    """Named versions are whole after every step, all pushes succeed and all collections end."""
    run(Collecting, max_examples=25, stateful_step_count=30)


class PublisherWithoutCommits(Publisher):
    """A publisher that breaks the rule: it tells collections of no commit."""

    @asynccontextmanager
    async def hold_packs(self, tenant: str) -> AsyncIterator[tuple[RunningCommit, ...]]:
        yield ()


class StagingWithoutDigests(Staging):
    """A staging that breaks the rule: it tells collections of no declared chunk."""

    def declared_digests(self, tenant: str) -> set[str]:
        return set()


def collect_at_each_step(data: Path, publisher: type[Publisher], staging: type[Staging]) -> int:
    """Push a deleted version again, with a collection after 0, 1, 2, ... steps. Return the number of steps."""
    for steps in count():
        world = World(data / str(steps), 0, publisher, staging)
        try:
            world.push(MODELS[0])
            world.finish()
            world.jobs.named_versions.clear()
            world.now_s += 1000
            world.push(MODELS[0])
            for _ in range(steps):
                world.step(0)
            done = not world.gates.waiting
            world.collect()
            world.finish(lambda number: -1)  # run the collection first
            world.check()
        finally:
            world.close()
        if done:
            return steps
    raise AssertionError("unreachable")


def test_push_during_a_collection_stays_whole(tmp_path: Path) -> None:
    """A push of a version that is being collected ends with a whole version, whenever the collection starts."""
    assert collect_at_each_step(tmp_path, Publisher, Staging) > 10


def test_without_its_care_a_version_lacks_something(tmp_path: Path) -> None:
    """The control: if a collection ignores pushes, it frees chunks that a push found in the store."""
    with pytest.raises((AssertionError, Refused), match=r"lacks|in no tier|did not come to its end"):
        collect_at_each_step(tmp_path, PublisherWithoutCommits, StagingWithoutDigests)
