"""Jobs of a push where a cluster runs the versions: done by a zygote beside, refused where there is none."""

import asyncio
from pathlib import Path

import pytest

from contracts.errors import OneMachineOnly, Refused
from contracts.jobs import GateFacts, GateJob, SealAttestation, SealJob
from controlplane.jobs import STANDBY_S, JobsBeside
from tests.controlplane.virtual_time import VirtualClock

JOB = GateJob(config_json="{}", tensors={})


class Desk:
    """Says that it was asked."""

    async def gate(self, job: GateJob) -> GateFacts:
        raise Refused(OneMachineOnly("asked", "of the desk"))

    async def seal(self, job: SealJob) -> SealAttestation:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("comes_after_s", "says"), [(None, "it needs a zygote"), (0.0, "asked"), (STANDBY_S / 2, "asked")]
)
async def test_a_zygote(tmp_path: Path, comes_after_s: float | None, says: str) -> None:
    """One that is there, or comes while it is waited for, has the job; without one it is refused in the end."""

    clock, socket = VirtualClock(), tmp_path / "zygote.sock"
    if comes_after_s == 0.0:
        socket.touch()
    task = asyncio.create_task(JobsBeside(socket, Desk(), clock).gate(JOB))
    await clock.advance(comes_after_s or 0.0)
    if comes_after_s:
        assert not task.done()
        socket.touch()
    await clock.advance(STANDBY_S + 1)
    with pytest.raises(Refused, match=says):
        await task
