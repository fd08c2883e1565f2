"""Ten thousand corruptions of every kind in every tier are healed or refused with the right error; none is served.

In the negative control, which runs without verification, damaged bytes are served.
"""

import asyncio
import logging
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from blake3 import blake3

from tests.weightcache.injection import CONTENT, Injection, Kind, Rig, Where, draw, kinds_of, make_bodies
from weightcache.sources.source import Verify, is_digest_of

COUNT = 10_000
AT_ONCE = 200

MEMORY_DISK = Path("/dev/shm")

Wrong = list[tuple[Injection, str | None]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Skip syncing and logging, which other tests check."""
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    logger = logging.getLogger("weightcache")  # its modules' loggers inherit the level
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory if possible: the test makes and removes tens of thousands of files."""
    if not MEMORY_DISK.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK, prefix="corruptions-") as path:
        yield Path(path)


def run(root: Path, count: int, verify: Verify, seed: int) -> tuple[Wrong, list[Injection], Rig]:
    """Inject `count` corruptions. Return those with a wrong answer, all injections, and the closed rig."""
    bodies, source = make_bodies(AT_ONCE, seed), random.Random(seed)
    rig = Rig(root, bodies, verify)

    async def main() -> tuple[Wrong, list[Injection]]:
        wrong: Wrong = []
        done: list[Injection] = []
        async with rig.open():
            while len(done) < count:
                injections = draw(bodies, source)
                wrong += await rig.inject(injections)
                done += injections
            rig.cache.arena.index.check_integrity()
            rig.cache.nvme.index.check_integrity()
        return wrong, done

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return *runner.run(main()), rig


@pytest.mark.deep
@pytest.mark.timeout(600)  # on two slow cores, beside another suite, it needed more than the 180 s of other tests
def test_ten_thousand_corruptions_are_healed_or_refused(disk: Path) -> None:
    """Every answer is right, every fault is counted, and all files on NVMe are right afterwards."""
    wrong, done, rig = run(disk, COUNT, is_digest_of, seed=17)
    assert wrong == []
    assert len(done) >= COUNT
    assert {(each.kind, each.where) for each in done} == {(kind, where) for where in Where for kind in kinds_of(where)}
    counters = rig.cache.counters
    counted = {(tier, kind): n for tier, kinds in counters.chunk_faults.items() for kind, n in kinds.items()}
    assert counted == sum((each.faults for each in done), Counter())
    assert counters.refused_chunks == Counter(each.want for each in done if each.want is not None)
    assert all(blake3(rig.path(each.digest).read_bytes()).hexdigest() == each.digest for each in rig.bodies)


def test_control_without_verification_serves_damage(disk: Path) -> None:
    """Negative control: without verification, every kind of damage that keeps the length is served."""
    wrong, done, _ = run(disk, 300, lambda data, digest: True, seed=17)
    served = {each.kind for each, answer in wrong if answer == "wrong"}
    assert served == set(CONTENT)
    assert len(wrong) > len(done) // 4
    assert all(answer is None for each, answer in wrong if each.kind in (Kind.EIO, Kind.SHORT, Kind.TRUNCATE))
