"""A whole activator process that starts while the control plane is down, with the feed that the previous one saved."""

import asyncio
from pathlib import Path

import pytest

from tests.activator.control import KEY, OTHER, STRANGER
from tests.activator.world import CHAT, ActivatorWorld, world
from tests.eventually import eventually

pytestmark = pytest.mark.deep


async def _until_kept(here: ActivatorWorld, what: str) -> None:
    """Wait until the saved feed contains this text."""
    path = here.data / "run" / "feed"
    await eventually(lambda: path.exists() and what.encode() in path.read_bytes())


async def _cut_off(here: ActivatorWorld, path: str = "/readyz") -> None:
    """Stop the control plane, kill the activator, and start another one."""
    await here.control.stop()
    here.process.kill()
    await here.process.wait()
    await here.restart(path)


async def test_ready_models_serve(tmp_path: Path) -> None:
    """Keys, replicas, limits and models are as before. Records wait, and each is shipped once."""

    async with world(tmp_path) as here:
        await here.replica("a")
        await _until_kept(here, "rt-a.sock")
        assert (await here.own("/readyz")).json["feed"] == "live"
        await _cut_off(here)
        for _ in range(3):
            assert (await here.post()).status == 200
        assert (await here.post(body={**CHAT, "model": "theirs"})).code == "model_not_found"
        assert (await here.get("/v1/models", STRANGER)).status == 200
        assert (await here.get("/v1/models", KEY + "x")).status == 401
        ready = await here.own("/readyz")
        assert (ready.status, ready.json["feed"]) == (200, "kept")
        assert await here.series("kelvin_feed_age_seconds")
        assert here.control.records == []
        await here.control.start(here.data / "run")
        records = await here.control.wait_for_records(3)
        assert sorted(record.sequence for record in records) == [1, 2, 3]
        await here.settled()
        await here.publish(removed_keys=("k1",))
        assert (await here.post()).status == 401
        assert (await here.own("/readyz")).json["feed"] == "live"


async def test_control_without_feed_file_nobody_is_authenticated(tmp_path: Path) -> None:
    """Negative control: without the file no key is accepted."""

    async with world(tmp_path) as here:
        await here.replica("a")
        await _until_kept(here, "rt-a.sock")
        await here.control.stop()
        here.process.kill()
        await here.process.wait()
        (here.data / "run" / "feed").unlink()
        await here.restart("/healthz")
        await asyncio.sleep(1.5)  # longer than it waits for a control plane before it reads the file
        assert (await here.post()).code == "unavailable"
        ready = await here.own("/readyz")
        assert (ready.status, ready.json) == (503, {"feed": "none", "age_s": None, "autoscaler": None})


async def test_expired_feed_authenticates_nobody(tmp_path: Path) -> None:
    """This holds for a running activator and a new one. So a revocation is missed for at most the maximum age."""

    async with world(tmp_path, feed_max_age_s=3) as here:
        await here.replica("a")
        await here.control.stop()
        async with asyncio.timeout(20):
            while (got := await here.post()).status == 200:
                await asyncio.sleep(0.05)
        assert (got.status, got.code) == (503, "unavailable")
        assert (await here.own("/readyz")).status == 503
        here.process.kill()
        await here.process.wait()
        await here.restart("/healthz")
        await asyncio.sleep(1.5)
        assert (await here.post()).status == 503
        await here.control.start(here.data / "run")
        async with asyncio.timeout(20):
            while (await here.post()).status != 200:
                await asyncio.sleep(0.05)


async def test_version_at_zero_waits_for_the_control_plane(tmp_path: Path) -> None:
    """It can't start without the control plane. The request waits, and is answered when the control plane is back."""

    async with world(tmp_path) as here:
        await _until_kept(here, OTHER)
        await _cut_off(here)
        request_task = asyncio.create_task(here.post())
        await here.wait_for_queued(1)
        await here.control.start(here.data / "run")
        await here.control.wait_for_stat()
        await here.replica("a")
        assert (await request_task).status == 200
