"""A runtime's background loops end neither with an error nor with the runtime that they serve."""

import asyncio
from pathlib import Path

import pytest

from contracts.jobs import RuntimeReport, RuntimeState
from runtime import app
from runtime.control_api import build_control_app
from runtime.metering import create_meter_page
from runtime.replica import Replica
from runtime.settings import RuntimeSettings
from service.client import ServiceClient
from service.unix import SocketDirectory
from tests.eventually import eventually

NAME = "rt-1.sock"


async def test_error_in_a_loop_leaves_the_runtime_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the watch over the engine nor the keeping of known answers takes a parked standby along."""
    errors = [ValueError("watch"), ValueError("keep")]

    async def fails(*_: object) -> None:
        if errors:
            raise errors.pop()
        await asyncio.Event().wait()

    monkeypatch.setattr(Replica, "watch", fails)
    monkeypatch.setattr(app, "_WARM_AFTER_S", 3600.0)
    monkeypatch.setattr(app, "keep_what_was_recorded", fails)

    stop, directory = asyncio.Event(), SocketDirectory(tmp_path / "run")
    settings = RuntimeSettings(tmp_path, None, drain_s=1, restore_s=1.0, step_s=1.0)
    meter = create_meter_page(settings.meters, "rt-1")
    listener = directory.listen(NAME)
    serving = asyncio.create_task(app.serve("rt-1", settings, directory, listener, meter, build_control_app(), stop))
    client = ServiceClient(directory, NAME, "the runtime")
    try:
        await eventually(lambda: not errors, "both loops have failed")
        report = await client.call("GET", "/control/state", RuntimeReport, timeout_s=10)
        assert report.state is RuntimeState.STANDBY
    finally:
        await client.close()
        stop.set()
        await serving
        directory.close()
