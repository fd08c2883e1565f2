"""FallbackScaler: versions start without a control plane, once each, never beside another autoscaler, never beyond the
device slots.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from activator.routing.policy.version_key import VersionKey
from activator.scale_link.fallback_scaler import WAKE_PATIENCE_S, FallbackScaler
from kelvin.contracts.artifact_errors import ChunkCorrupt
from kelvin.contracts.artifacts.runtime_control import RuntimeState
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.serving.machine import Machine
from kelvin.contracts.timeline import Stage
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.standby_lock import acquire_standby_lock, try_acquire_standby_lock
from kelvin.telemetry.telemetry import open_without_traces
from tests.activator.scale_link.parked_standby import FakeStandby
from tests.eventually import eventually

KEY, OTHER = (VersionKey("t", model, "a" * 64) for model in ("m", "n"))


@dataclass
class FallbackScalerWorld:
    """A fallback scaler between a control plane, which may be down, and parked standbys."""

    directory: SocketDirectory
    is_accepted: bool = False  # the control plane accepts wake calls
    is_heard: bool = False
    machine: Machine | None = field(default_factory=lambda: Machine(slots=2, cores=4, threads_cap=2, kv_bytes=1 << 20))
    now_s: float = 100.0
    published: list[Feed] = field(default_factory=list)
    parked: list[FakeStandby] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stand_in = FallbackScaler(
            self.send_wake, self.directory, is_feed_connected=lambda: self.is_heard, machine=lambda: self.machine,
            publish_line=self.published.append, wake_sent_us=lambda _: int((self.now_s - 3) * 1e6),
            page=open_without_traces("activator").page, clock=lambda: self.now_s,
        )  # fmt: skip

    async def send_wake(self, key: VersionKey) -> bool:
        return self.is_accepted

    async def park(self, name: str) -> FakeStandby:
        parked = FakeStandby(self.directory.path, name)
        await parked.start()
        self.parked.append(parked)
        return parked

    async def wait_patiently(self) -> None:
        """Wait until the fallback scaler would act."""
        assert not await self.stand_in.send_wake(KEY)
        self.now_s += WAKE_PATIENCE_S

    async def settled(self) -> None:
        await eventually(lambda: "starting=0" in repr(self.stand_in))


@asynccontextmanager
async def world(tmp_path: Path) -> AsyncIterator[FallbackScalerWorld]:
    (tmp_path / "meters").mkdir()
    with closing(SocketDirectory(tmp_path)) as directory:
        here = FallbackScalerWorld(directory)
        try:
            yield here
        finally:
            for parked in here.parked:
                parked.release.set()
            await here.stand_in.close()
            for parked in here.parked:
                await parked.stop()


async def test_fallback_scaler_starts_a_version_once(tmp_path: Path) -> None:
    """It acts only after WAKE_PATIENCE_S, and starts one standby despite several calls. The row names the version."""
    async with world(tmp_path) as here:
        one, two = [await here.park(name) for name in ("r1", "r2")]
        assert not await here.stand_in.send_wake(KEY)
        here.now_s += WAKE_PATIENCE_S - 0.01
        assert not await here.stand_in.send_wake(KEY)
        assert one.binds == 0
        here.now_s += 0.01
        for _ in range(3):
            assert await here.stand_in.send_wake(KEY)
        await eventually(lambda: one.state is RuntimeState.RESTORING)
        assert here.published == []
        one.release.set()
        await here.settled()
        (row,) = here.published[0].replicas
        assert (row.runtime_id, row.address, row.max_streams, row.draining) == ("r1", "rt-r1.sock", 4, False)
        assert (row.tenant, row.model, row.version) == KEY
        assert [span.stage for span in row.restore] == [Stage.DECIDED, Stage.PROMOTED, Stage.READY]
        assert [span.after_us for span in row.restore] == [3_000_000, 3_000_000, 3_000_009]
        assert one.bound is not None
        assert (one.bound.threads, one.bound.device_class, one.bound.kv_bytes) == (2, "cpu-2", 64 << 20)
        assert await here.stand_in.send_wake(KEY)  # from a request that has not seen the row yet
        await here.settled()
        assert [len(line.replicas) for line in here.published] == [1, 1]
        assert (one.binds, two.binds) == (1, 0)


@pytest.mark.parametrize("why", ["is_accepted", "is_heard", "is_held", "no machine", "is_away"])
async def test_fallback_scaler_never_acts_beside_another_autoscaler(tmp_path: Path, why: str) -> None:
    """The other autoscaler accepts the call, is heard, or holds the lock though it hangs; or the feed is too old.
    Negative control: without one the version starts.
    """
    async with world(tmp_path) as here:
        standby = await here.park("r1")
        standby.release.set()
        await here.wait_patiently()
        held = try_acquire_standby_lock(here.directory) if why == "is_held" else None
        here.is_accepted, here.is_heard = why == "is_accepted", why == "is_heard"
        if why == "no machine":
            here.machine = None
        assert await here.stand_in.send_wake(KEY) == (why in ("is_accepted", "is_away"))
        await here.settled()
        if held is not None:
            held.close()
        assert standby.binds == (why == "is_away")


async def test_lock_is_held_until_the_standby_is_bound(tmp_path: Path) -> None:
    """A control plane that starts meanwhile finds the standby restoring, and does not wait for its bytes."""
    async with world(tmp_path) as here:
        standby = await here.park("r1")
        await here.wait_patiently()
        assert await here.stand_in.send_wake(KEY)
        assert try_acquire_standby_lock(here.directory) is None
        await eventually(lambda: standby.state is RuntimeState.RESTORING)
        (await acquire_standby_lock(here.directory, 30)).close()
        here.is_heard = True  # it publishes what it has adopted
        standby.release.set()
        await here.settled()
        assert here.published == []


async def test_fallback_scaler_never_exceeds_device_slots(tmp_path: Path) -> None:
    """Two slots, three standbys: the third version waits, even while a process that stopped listening has a slot."""
    async with world(tmp_path) as here:
        one, two, three = [await here.park(name) for name in ("r1", "r2", "r3")]
        await here.wait_patiently()
        for key in (KEY, OTHER, KEY._replace(model="o")):
            for parked in (one, two, three):
                parked.release.set()
            assert await here.stand_in.send_wake(key)
            await here.settled()
        assert [parked.binds for parked in (one, two, three)] == [1, 1, 0]
        (here.directory.path / "rt-r1.sock").unlink()
        assert await here.stand_in.send_wake(KEY)
        await here.settled()
        assert three.binds == 0
        next((here.directory.path / "meters").glob("*.r1")).unlink()  # its supervisor has recorded its exit
        assert await here.stand_in.send_wake(KEY)
        await here.settled()
        assert three.binds == 1


async def test_failed_own_start_refuses_waiting_requests(tmp_path: Path) -> None:
    """A start that fails by its bytes refuses requests. After a lost standby the next call starts another one."""
    async with world(tmp_path) as here:
        one, two = [await here.park(name) for name in ("r1", "r2")]
        one.failure = ChunkCorrupt("c" * 64, "nvme")
        one.release.set()
        await here.wait_patiently()
        assert await here.stand_in.send_wake(KEY)
        await here.settled()
        ((failure,),) = (line.failures for line in here.published)
        assert (failure.code, failure.tenant, failure.version) == ("chunk_corrupt", KEY.tenant, KEY.version)
        two.state = RuntimeState.STANDBY
        assert await here.stand_in.send_wake(KEY)
        await eventually(lambda: two.state is RuntimeState.RESTORING)
        await two.stop()  # it is killed
        here.parked.remove(two)
        await here.settled()
        assert len(here.published) == 1


async def test_missing_standby_is_checked_again(tmp_path: Path) -> None:
    """Each call checks again, and nothing is published."""
    async with world(tmp_path) as here:
        await here.wait_patiently()
        assert await here.stand_in.send_wake(KEY)
        await here.settled()
        standby = await here.park("r1")
        standby.release.set()
        assert await here.stand_in.send_wake(KEY)
        await here.settled()
        assert [len(line.replicas) for line in here.published] == [1]
