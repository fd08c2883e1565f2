"""Jobs of a push are bounded in time and memory, shared fairly between tenants, and end with their tenant or caller."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.runtime_control import GateJob, SealJob
from kelvin.contracts.errors import Failure, Refused, TenantSuspended, Unavailable
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.ipc import engine_jobs
from kelvin.ipc.engine_jobs import JobRunner
from kelvin.ipc.forked_process import ForkedProcess
from tests.eventually import eventually

GROWS = "x = []\nwhile True: x.append(bytearray(b'1') * (8 << 20))"
SLEEPS = "import time; time.sleep(600)"
DIES = "raise SystemExit(1)"

Work = Callable[[GateJob | SealJob], Awaitable[Any]]


def _signal(program: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal. `send_signal` would reap a dead process, and asyncio would then report the exit status 255."""
    if program.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(program.pid, number)


class Process:
    """A standby as the job runner uses it, on a real process that replies only by dying."""

    def __init__(self, program: asyncio.subprocess.Process) -> None:
        self.pid = program.pid
        self._program = program

    async def gate(self, job: GateJob, timeout_s: float) -> Any:
        await self._program.wait()
        raise Refused(Unavailable("the runtime"))

    async def seal(self, job: SealJob, timeout_s: float) -> Any:
        return await self.gate(GateJob(config_json="", tensors={}), timeout_s)

    async def wait_gone(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._program.wait(), timeout_s)
        return self._program.returncode is not None

    def signal(self, number: signal.Signals) -> None:
        _signal(self._program, number)


class Standbys:
    """A source of standbys, each a new process that runs `source`."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.born: list[asyncio.subprocess.Process] = []

    @asynccontextmanager
    async def one(self) -> AsyncIterator[ForkedProcess]:
        program = await asyncio.create_subprocess_exec(sys.executable, "-c", self._source)
        self.born.append(program)
        try:
            yield Process(program)  # type: ignore[misc]
        finally:
            _signal(program, signal.SIGKILL)
            await program.wait()


class Scripted:
    """A standby whose jobs run `work`."""

    pid = 0

    def __init__(self, work: Work) -> None:
        self._work = work

    async def gate(self, job: GateJob | SealJob, timeout_s: float) -> Any:
        return await self._work(job)

    seal = gate

    async def wait_gone(self, timeout_s: float) -> bool:
        return True

    def signal(self, number: signal.Signals) -> None: ...


def scripted_runner(work: Work, weight_of: Callable[[str], int] = lambda _: 1) -> JobRunner:
    @asynccontextmanager
    async def standby() -> AsyncIterator[ForkedProcess]:
        yield Scripted(work)  # type: ignore[misc]

    return JobRunner(standby, weight_of)


def _gate(tenant: str = "acme") -> GateJob:
    return GateJob(config_json="{}", tensors={}, tenant=tenant)


async def _failure(runner: JobRunner) -> Failure:
    with pytest.raises(Refused) as refused:
        await runner.gate(_gate())
    return refused.value.failure


@pytest.mark.parametrize(
    ("source", "bound", "value", "reason", "processes"),
    [
        pytest.param(GROWS, "GATE_BYTES", 64 << 20, "more than 67108864 bytes of memory", 1, id="memory"),
        pytest.param(SLEEPS, "GATE_S", 0.3, "longer than 0 s", 1, id="time"),
        pytest.param(DIES, "GATE_S", 60.0, "ended 2 times", 2, id="a process that dies"),
    ],
)
async def test_job_beyond_its_bound_names_the_artifact(
    monkeypatch: pytest.MonkeyPatch, source: str, bound: str, value: float, reason: str, processes: int
) -> None:
    """The job is killed and its push refused with the reason. If the process dies, it is tried a second time."""
    monkeypatch.setattr(engine_jobs, bound, value)
    standbys = Standbys(source)
    failure = await _failure(JobRunner(standbys.one))
    assert isinstance(failure, ArtifactRejected)
    assert failure.status == 422
    assert reason in failure.reason
    assert len(standbys.born) == processes
    assert all(program.returncode is not None for program in standbys.born)


@pytest.mark.virtual_time
async def test_job_outlives_the_death_of_every_parked_process() -> None:
    """If every standby is killed within half a second, the job runs on the next one and the artifact isn't blamed."""
    loop, deaths = asyncio.get_running_loop(), list[float]()

    async def judge(_: object) -> str:
        if not deaths or loop.time() - deaths[0] < 0.5:
            deaths.append(loop.time())
            raise Refused(Unavailable("the runtime"))
        return "judged"

    assert await scripted_runner(judge).gate(_gate()) == "judged"  # type: ignore[comparison-overlap]
    assert len(deaths) == 1


async def test_job_ends_with_its_tenant() -> None:
    """A suspended tenant's job is killed before its time limit."""
    standbys, suspended = Standbys(SLEEPS), set[str]()
    job = asyncio.create_task(_failure(JobRunner(standbys.one, is_suspended=suspended.__contains__)))
    await eventually(lambda: bool(standbys.born))
    suspended.add("acme")
    assert await asyncio.wait_for(job, 20) == TenantSuspended()
    assert standbys.born[0].returncode == -signal.SIGKILL


async def test_waiting_job_of_a_suspended_tenant_takes_no_process() -> None:
    """A job whose tenant is suspended while it waits never starts a process."""
    standbys, suspended = Standbys(SLEEPS), set[str]()
    runner = JobRunner(standbys.one, is_suspended=suspended.__contains__)
    running = asyncio.create_task(runner.gate(_gate("other")))
    await eventually(lambda: len(standbys.born) == 1)
    waiting = asyncio.create_task(_failure(runner))
    await asyncio.sleep(0)
    suspended.add("acme")
    running.cancel()
    assert await asyncio.wait_for(waiting, 20) == TenantSuspended()
    assert len(standbys.born) == 1


async def test_job_whose_caller_left_kills_its_process() -> None:
    """The process is killed, because it may hold the interpreter forever. The next tenant's job starts."""
    standbys = Standbys(SLEEPS)
    runner = JobRunner(standbys.one)
    abandoned = asyncio.create_task(runner.gate(_gate("hostile")))
    await eventually(lambda: len(standbys.born) == 1)
    other = asyncio.create_task(runner.gate(_gate("victim")))
    await asyncio.sleep(0)
    abandoned.cancel()
    await asyncio.wait({abandoned})
    assert standbys.born[0].returncode == -signal.SIGKILL
    await eventually(lambda: len(standbys.born) == 2)
    other.cancel()
    await asyncio.wait({other})


async def test_tenant_with_many_jobs_waits_behind_another_one() -> None:
    """A tenant with many jobs blocks others neither from the next turn nor from the queue."""
    order, turn = list[str](), asyncio.Event()

    async def judge(job: GateJob | SealJob) -> None:
        order.append(job.tenant)
        await turn.wait()

    runner = scripted_runner(judge)
    many = [asyncio.create_task(runner.gate(_gate("many"))) for _ in range(1 + engine_jobs.MAX_WAITING_OF_TENANT)]
    await asyncio.sleep(0)
    with pytest.raises(Refused) as refused:
        await runner.gate(_gate("many"))
    assert isinstance(refused.value.failure, Overloaded)
    one = asyncio.create_task(runner.gate(_gate("one")))
    await asyncio.sleep(0)
    turn.set()
    await asyncio.gather(one, *many)
    assert order[:2] == ["many", "one"]


@pytest.mark.virtual_time
@pytest.mark.parametrize("kind", ["gate", "seal"])
async def test_jobs_are_shared_by_tenant_weight(kind: str) -> None:
    """With three times the weight, a tenant gets three times the turns, while both always wait for either kind."""
    order, weights = list[str](), {"heavy": 3, "light": 1}

    async def work(job: GateJob | SealJob) -> None:
        order.append(job.tenant)
        await asyncio.sleep(1.0)

    runner = scripted_runner(work, weights.__getitem__)

    async def always(tenant: str) -> None:
        while len(order) < 40:
            if kind == "gate":
                await runner.gate(_gate(tenant))
            else:
                await runner.seal(SealJob(tenant=tenant, version="ab" * 32, total_bytes=1))

    await asyncio.gather(*[always(tenant) for tenant in weights for _ in range(2)])
    assert order[:40].count("heavy") == pytest.approx(30, abs=1)


async def test_gate_does_not_wait_for_a_seal() -> None:
    """A seal of a large draft may take a quarter of an hour. Meanwhile, other pushes can pass the gate."""
    sealing, judged = asyncio.Event(), list[str]()

    async def work(job: GateJob | SealJob) -> None:
        if isinstance(job, SealJob):
            sealing.set()
            await asyncio.Event().wait()
        judged.append(job.tenant)

    runner = scripted_runner(work)
    seal = asyncio.create_task(runner.seal(SealJob(tenant="large", version="ab" * 32, total_bytes=1 << 40)))
    await sealing.wait()
    async with asyncio.timeout(20):
        await runner.gate(_gate("one"))
    assert judged == ["one"]
    seal.cancel()
    await asyncio.wait({seal})


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        pytest.param({"total_bytes": 1 << 20}, 60.05, id="a small draft"),
        pytest.param({"total_bytes": 1 << 30}, 111.2, id="a gigabyte"),
        pytest.param({"total_bytes": 1 << 40}, 900, id="the maximum"),
        pytest.param({}, 900, id="no size, from an older snapshotter"),
        pytest.param({"total_bytes": 1 << 40, "distinct_bytes": 1 << 20}, 60.05, id="one chunk again and again"),
    ],
)
async def test_time_of_a_seal_follows_its_bytes(sizes: dict[str, int], seconds: float) -> None:
    """The time limit follows the draft's size, so that a small draft can't hold the turn for a quarter of an hour."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def never_end(_: object) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Refused, match="judging it takes longer than"):
        await scripted_runner(never_end).seal(SealJob(tenant="acme", version="ab" * 32, **sizes))
    assert loop.time() - began_s == pytest.approx(seconds, abs=0.2)
