"""A schedule writes what is new, thins out what is old, and keeps to the place of its own installation."""

import os
from pathlib import Path

import pytest

from contracts.settings import BadSetting
from controlplane.backup_place import backups_in, claim_place, name_of
from controlplane.journal import extent_of
from controlplane.policy.retention import NEWEST
from tests.controlplane.test_restore import World, back, ids, in_world


def test_a_schedule_writes_only_what_is_new(tmp_path: Path) -> None:
    """Nothing new, no new file; but whoever watches the newest one's age sees that it is true still."""

    async def scenario(world: World) -> None:
        loop = world.loop()
        assert await loop.once() is not None
        ((_, newest),) = backups_in(world.place)
        os.utime(newest, (1, 1))
        assert await loop.once() is None
        assert newest.stat().st_mtime > 1
        await world.enter(1)
        assert await loop.once() is not None

    in_world(tmp_path, scenario)


def test_a_schedule_thins_backups_and_journal(tmp_path: Path) -> None:
    """The journal goes back to the third newest; of the others what the retention says."""

    async def scenario(world: World) -> None:
        loop = world.loop()
        for moment in range(1000, 1000 + 2 * NEWEST):
            (world.place / name_of(moment)).touch()
        for number in range(1, NEWEST + 1):
            await world.enter(number)
            await loop.once()
        assert extent_of(world.place).trimmed == 1
        assert len(backups_in(world.place)) <= NEWEST + NEWEST  # several may be of one second, and one file

    in_world(tmp_path, scenario)
    assert ids(tmp_path / "data" / "kelvin.db") == ["req-1", "req-2", "req-3"]
    assert back(tmp_path / "place", tmp_path / "new").missing == 0


def test_a_place_belongs_to_one_installation(tmp_path: Path) -> None:
    """A fresh data directory would thin out the backups of the lost one: it is refused, by setting and rule."""
    in_world(tmp_path, lambda world: world.enter(1))
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    with pytest.raises(BadSetting, match=r"KELVIN_BACKUP=.*holds the backups of another installation"):
        claim_place(tmp_path / "place", fresh)
    claim_place(tmp_path / "place", tmp_path / "data")
