"""A pod that waits begins anew what ended in it: once, whatever else was about to come back."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from contracts.jobs import Parked
from contracts.jobs import Pod as Told
from kelvin.policy.restarts import Restarts
from kelvin.settings import PodSettings
from kelvin.supervisor.children import Child
from kelvin.supervisor.graves import Graves
from kelvin.supervisor.pod import Pod
from tests.virtual_loop import run_virtually


def test_an_agent_that_was_coming_back_is_begun_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It died a moment before the runtime was released; what it had kept is gone."""
    parked = Parked(device_class="cpu-1", threads=1, kv_bytes=1, store="file:///store")
    settings = PodSettings(tmp_path, 1, {}, Told(runtime_id="r", host="", port=1, parked=parked))
    left = tmp_path / "cache" / "chunk"
    left.parent.mkdir()
    left.touch()
    started: list[str] = []
    monkeypatch.setattr(Pod, "_start", lambda _, child: started.append(cast(Child, child).spec.name))

    async def main() -> None:
        pod = Pod(settings, cast(Graves, None), 0)
        pod._cache.restarts = Restarts(deaths=5)
        pod._bringing_back = asyncio.create_task(pod._bring_back())
        await asyncio.sleep(0.01)
        await pod._renew()
        await asyncio.sleep(60)

    run_virtually(main())
    assert started == ["cache", "runtime"]
    assert not left.exists()
