"""A verdict on a file of the NVMe tier is about that file, whatever became of its chunk since."""

import asyncio
import threading
from pathlib import Path

import pytest

from tests.weightcache.test_nvme import NAMES, WRONG, fetched, page, with_tier
from weightcache.files import ChunkFiles
from weightcache.nvme import NvmeTier
from weightcache.policy.healing import Outcome


class HeldVerify:
    """Says what is right, but the first look waits until it is let go."""

    def __init__(self) -> None:
        self.held, self.go = threading.Event(), threading.Event()

    def __call__(self, data: memoryview, digest: str) -> bool:
        wrong = data[0] == WRONG
        if wrong and not self.held.is_set():
            self.held.set()
            assert self.go.wait(30)
        return not wrong


@pytest.mark.parametrize("how", ["fetch", "look"])
@pytest.mark.parametrize("again", [True, False], ids=["kept anew", "gone"])
def test_verdict_on_an_old_file_spares_the_new_one(tmp_path: Path, how: str, again: bool) -> None:
    """Two look at one damaged file. The slower one finds it replaced by then, and says nothing of the new file."""
    verify = HeldVerify()

    async def scenario(tier: NvmeTier) -> None:
        key = ("a", NAMES[0])
        assert await tier.admit(*key, page(WRONG))
        slow = asyncio.create_task(tier.look(*key, page(0)) if how == "look" else tier.fetch(*key, page(0)))
        await asyncio.to_thread(verify.held.wait, 30)
        assert await tier.look(*key, page(0)) is Outcome.DIGEST
        await tier.quarantine(*key)
        if again:
            assert await tier.admit(*key, page(7))
        verify.go.set()
        assert await slow is Outcome.ABSENT
        assert tier.index.holds(key) is again
        if again:
            assert await fetched(tier, NAMES[0]) == (Outcome.VERIFIED, 7)

    with_tier(tmp_path, scenario, verify=verify)


def test_nothing_is_written_where_a_file_is_being_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is admitted while its faulty file goes aside is not kept: the new file would go in its place."""
    held, go = threading.Event(), threading.Event()
    quarantine = ChunkFiles.quarantine

    def slowly(self: ChunkFiles, path: Path, name: str) -> None:
        held.set()
        assert go.wait(30)
        quarantine(self, path, name)

    monkeypatch.setattr(ChunkFiles, "quarantine", slowly)

    async def scenario(tier: NvmeTier) -> None:
        assert await tier.admit("a", NAMES[0], page(WRONG))
        aside = asyncio.create_task(tier.quarantine("a", NAMES[0]))
        await asyncio.to_thread(held.wait, 30)
        assert not await tier.admit("a", NAMES[0], page(7))
        go.set()
        await aside
        assert await tier.admit("a", NAMES[0], page(7))
        assert await fetched(tier, NAMES[0]) == (Outcome.VERIFIED, 7)

    with_tier(tmp_path, scenario)
