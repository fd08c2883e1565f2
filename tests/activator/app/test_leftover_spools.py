"""Usage records that another activator leaves in its spool."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from activator.app import app
from kelvin.spool import Spool
from tests.eventually import eventually


async def test_records_of_activator_that_ends_later_are_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a restart the old activator still writes its spool when the new one looks for the first time."""
    monkeypatch.setattr(app, "RECOVER_AGAIN_S", 0.01)
    shipped: list[bytes] = []

    async def post(records: Sequence[bytes]) -> None:
        shipped.extend(records)

    old = Spool.open(tmp_path, "activator-old")
    await old.append(lambda _: b"a record")
    work = asyncio.create_task(app.ship_leftovers(tmp_path, post))
    await asyncio.sleep(0)  # let it look once
    assert not shipped
    old.close()
    await eventually(lambda: shipped == [b"a record"] and not (tmp_path / "activator-old").exists())
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
