"""A backup's audit is verified before it is put in place."""

from pathlib import Path

import pytest
from sqlalchemy import text

from controlplane.placing import CannotRestore
from tests.controlplane.test_restore import World, back, in_world


def test_an_audit_that_is_not_sound_is_refused_unless_asked_for(tmp_path: Path) -> None:
    """A forged entry is named; who wants the data nevertheless says so, and is told."""

    async def scenario(world: World) -> None:
        with world.database.engine.begin() as connection:
            connection.execute(text("DROP TRIGGER audit_keeps"))
            connection.execute(text("UPDATE audit SET actor = 'another' WHERE link = 2"))
        await world.write(tmp_path / "b.backup")

    in_world(tmp_path, scenario)
    with pytest.raises(CannotRestore, match=r"the audit of default is not sound: link 2 \(key\.created\)"):
        back(tmp_path / "b.backup", tmp_path / "new")
    report = back(tmp_path / "b.backup", tmp_path / "new", accept_unsound=True)
    assert not report.sound
    assert [(each.tenant, each.links) for each in report.audits] == [("default", 1)]
