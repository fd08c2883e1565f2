"""Push jobs use up a standby each, cold starts go first, and the queue is bounded. Standbys are fake processes."""

import asyncio
from pathlib import Path

import pytest

from controlplane.app.push_jobs import STANDBY_WAIT_S, ZygotePushJobs
from controlplane.scaling.local.runtime_process import RuntimeProcess
from kelvin.contracts.artifacts.runtime_control import GateFacts, GateJob, SealAttestation, SealJob
from kelvin.contracts.errors import OneMachineOnly, Refused, Unavailable
from tests.controlplane.builders import digest, key
from tests.controlplane.fake_zygote import GATE
from tests.controlplane.machine_fixture import RunDirectory, local
from tests.controlplane.virtual_time import VirtualClock
from tests.eventually import eventually

SEAL = SealJob(tenant="default", version=digest("a"))
JOB = GateJob(config_json="{}", tensors={})


async def test_each_job_has_a_process_of_its_own(run: RunDirectory) -> None:
    """A gate and a seal use two standbys. Both are dead afterwards, and the pool is full again."""
    async with local(run) as it:
        assert await it.jobs.gate(JOB) == GATE
        assert (await it.jobs.seal(SEAL)).version == SEAL.version
        ((gate, _),), ((seal, _),) = run.calls("gate"), run.calls("seal")
        assert gate != seal
        await eventually(lambda: gate not in it.table and seal not in it.table)
        await it.wait_until_parked()
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        assert run.calls("bind:m")[0][0] not in (gate, seal)
        assert it.listener.deaths == [], "a job's process is no replica"


async def test_cancelled_job_ends_its_standby(run: RunDirectory) -> None:
    """A standby whose job is cancelled during the call exits. It is not parked again."""
    async with local(run) as it:
        await it.wait_until_parked()
        (standby,) = it.table
        reached, never = asyncio.Event(), asyncio.Event()

        async def hang(self: RuntimeProcess, job: object, timeout_s: float) -> None:
            reached.set()
            await never.wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RuntimeProcess, "gate", hang)
            job = asyncio.create_task(it.jobs.gate(JOB))
            await reached.wait()
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
        await eventually(lambda: standby.runtime_id not in it.table)
        await it.wait_until_parked()


async def test_a_job_that_fails_ends_its_standby_too(run: RunDirectory) -> None:
    """A process that has computed is never used again."""
    async with local(run) as it:
        await it.wait_until_parked()
        (standby,) = it.table

        async def fails(self: RuntimeProcess, job: object, timeout_s: float) -> None:
            raise Refused(Unavailable("x"))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RuntimeProcess, "gate", fails)
            with pytest.raises(Refused):
                await it.jobs.gate(JOB)
        await eventually(lambda: standby.runtime_id not in it.table)


async def test_start_takes_standby_before_job(run: RunDirectory) -> None:
    """A job and then a start wait for a standby. The first parked standby goes to the start, the next to the job."""
    async with local(run) as it:
        await it.wait_until_parked()
        process = it.pool.try_take()
        assert process is not None
        (run.path / "zygote.sock").rename(run.path / "away")
        job = asyncio.create_task(it.jobs.gate(JOB))
        await eventually(lambda: len(it.pool._jobs) == 1)
        it.apply(key(), 1)
        await eventually(lambda: len(it.pool._starts) == 1)
        it.pool.put_back(process)
        await it.wait_until_ready(key())
        assert it.table.replicas_of(key())[0].runtime_id == process.runtime_id
        assert not job.done()
        (run.path / "away").rename(run.path / "zygote.sock")
        assert await job == GATE


class Desk:
    """A job runner that raises an error which says that it was called."""

    async def gate(self, job: GateJob) -> GateFacts:
        raise Refused(OneMachineOnly("asked", "of the desk"))

    async def seal(self, job: SealJob) -> SealAttestation:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("comes_after_s", "says"), [(None, "it needs a zygote"), (0.0, "asked"), (STANDBY_WAIT_S / 2, "asked")]
)
async def test_job_waits_for_a_zygote_or_is_refused(tmp_path: Path, comes_after_s: float | None, says: str) -> None:
    """The job runs if the zygote exists or appears while the job waits. Otherwise the job is refused in the end."""
    clock, socket = VirtualClock(), tmp_path / "zygote.sock"
    if comes_after_s == 0.0:
        socket.touch()
    task = asyncio.create_task(ZygotePushJobs(socket, Desk(), clock).gate(JOB))
    await clock.advance(comes_after_s or 0.0)
    if comes_after_s:
        assert not task.done()
        socket.touch()
    await clock.advance(STANDBY_WAIT_S + 1)
    with pytest.raises(Refused, match=says):
        await task
