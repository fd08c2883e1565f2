"""A waiting pod restarts its cache agent once when a runtime ends, even if a restart was already due."""

import asyncio
import itertools
import signal
import time
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest

from kelvin.contracts.artifacts.runtime_control import ParkedSpec, Pod
from kelvin.supervisor import child_group
from kelvin.supervisor.child_group import Child, ReapedChild
from kelvin.supervisor.pod_supervisor import PodSupervisor
from kelvin.supervisor.settings import PodSettings


@pytest.mark.virtual_time
async def test_an_agent_that_was_coming_back_is_begun_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent died just before the runtime was released. Its cache is deleted."""
    parked = ParkedSpec(device_class="cpu-1", threads=1, kv_bytes=1, store="file:///store")
    settings = PodSettings(tmp_path, 1, {}, Pod(runtime_id="r", host="", port=1, parked=parked))
    pids = itertools.count(4_000_000)  # larger than any process id that the kernel assigns
    running: dict[str, int] = {}
    started: list[str] = []
    dead: list[ReapedChild] = []

    def start(child: Child, *_: object) -> None:
        running[child.spec.name] = next(pids)
        started.append(child.spec.name)
        child.process = cast(None, Mock(pid=running[child.spec.name]))
        child.started_at_s = time.monotonic()

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(child_group, "reap_children", lambda: iter([dead.pop()] if dead else []))

    pod = PodSupervisor(settings, Mock(), 0)

    async def die(name: str, status: int) -> None:
        dead.append(ReapedChild(running[name], status, 1, 1, 1, 1))
        pod.group.reap_dead()
        await asyncio.sleep(0.01)

    pod.start()
    left = tmp_path / "cache" / "chunk"
    left.parent.mkdir()
    left.touch()
    await die("cache", -signal.SIGKILL)
    assert started == ["cache", "runtime", "cache"], "the first time at once"
    await die("cache", -signal.SIGKILL)
    started.clear()
    await die("runtime", 0)
    await asyncio.sleep(60)
    assert started == ["cache", "runtime"]
    assert not left.exists()
