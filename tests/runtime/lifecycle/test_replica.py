"""The life of a replica process: one version, final failures, sleep and wake, drains."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kelvin.contracts.accounting.meter_format import Phase, decode_meter
from kelvin.contracts.artifact_errors import ArtifactRejected, ChunkMissing, WeightsDamaged
from kelvin.contracts.artifacts.runtime_control import (
    BindRequest,
    GateFacts,
    GateJob,
    RuntimeState,
    SealAttestation,
    SealJob,
)
from kelvin.contracts.errors import Conflict, Failure, Internal, Refused, Unavailable
from runtime.lifecycle.replica import TRANSITIONS, ReplicaOperations
from runtime.surface.served_version import EngineCallbacks, ServedDecoder, ServedVersion
from tests.runtime.fakes import BIND, fake_work, replica_of, script_of
from tests.runtime.scripted_engine import ScriptedEngine


def metered_phase(tmp_path: Path) -> Phase:
    (path,) = tmp_path.iterdir()
    return decode_meter(path.read_bytes()).phase


async def test_bound_standby_is_ready(tmp_path: Path) -> None:
    """A bound replica is ready and idle, reports its version, and refuses another bind."""
    replica = replica_of(tmp_path)
    assert metered_phase(tmp_path) is Phase.STANDBY
    bound = await replica.bind(BIND)
    assert (bound.runtime_id, bound.max_streams, len(bound.spans)) == ("rt1", 8, 3)
    assert metered_phase(tmp_path) is Phase.IDLE
    report = replica.report()
    assert (report.state, report.tenant, report.version, report.leases) == (
        RuntimeState.READY, "acme", BIND.version, 1
    )  # fmt: skip
    with pytest.raises(Refused) as caught:
        await replica.bind(BIND)
    assert isinstance(caught.value.failure, Conflict)
    assert replica.state is RuntimeState.READY
    await replica.close()


@pytest.mark.parametrize("failure", [ChunkMissing("ab"), ArtifactRejected("config.json", "no")])
async def test_failed_restore_fails_the_replica(tmp_path: Path, failure: Failure) -> None:
    """A failed restore returns its failure. The process serves no request afterwards, and may exit."""
    replica = replica_of(tmp_path, failure=failure)
    with pytest.raises(Refused) as caught:
        await replica.bind(BIND)
    assert caught.value.failure == failure
    assert replica.failure == failure
    assert replica.may_exit.is_set()
    with pytest.raises(Refused) as caught:
        replica.require_ready()
    assert caught.value.failure == failure
    with pytest.raises(Refused):
        await replica.bind(BIND)


async def test_exception_in_a_restore_fails_the_replica(tmp_path: Path) -> None:
    """Any exception in a restore fails the replica."""

    def fail(_: BindRequest, __: EngineCallbacks) -> ServedDecoder:
        raise RuntimeError("bug")

    replica = replica_of(tmp_path, ReplicaOperations(fail, _refuse_gate, _refuse_seal))
    with pytest.raises(RuntimeError):
        await replica.bind(BIND)
    assert replica.failure == Internal()


def _refuse_gate(_: GateJob) -> GateFacts:
    raise Refused(ArtifactRejected("config.json", "no"))


def _refuse_seal(_: SealJob) -> SealAttestation:
    raise Refused(ArtifactRejected("config.json", "no"))


async def test_drain_ends_the_wait_for_a_restore(tmp_path: Path) -> None:
    """A drain ends the wait for a hanging restore, and the process may exit."""
    may_end, inside = threading.Event(), threading.Event()

    def hang(_: BindRequest, __: EngineCallbacks) -> ServedDecoder:
        inside.set()
        may_end.wait(20)
        raise Refused(Internal())

    replica = replica_of(tmp_path, ReplicaOperations(hang, _refuse_gate, _refuse_seal))
    binding = asyncio.create_task(replica.bind(BIND))
    await asyncio.to_thread(inside.wait, 20)
    replica.drain()
    with pytest.raises(Refused) as caught:
        await asyncio.wait_for(binding, 5)
    assert isinstance(caught.value.failure, Unavailable)
    assert replica.may_exit.is_set()
    assert replica.failure is None, "a drain is no failure"
    may_end.set()


async def test_sleeping_replica_wakes_to_its_own_version(tmp_path: Path) -> None:
    """A sleeping replica costs its tenant nothing, keeps its lease, and accepts no request and no other version."""
    replica = replica_of(tmp_path)
    await replica.bind(BIND)
    await replica.sleep()
    assert replica.state is RuntimeState.ASLEEP
    assert metered_phase(tmp_path) is Phase.STANDBY
    report = replica.report()
    assert (report.state, report.version, report.leases, report.kv_blocks_total) == (
        RuntimeState.ASLEEP, BIND.version, 1, 0
    )  # fmt: skip
    with pytest.raises(Refused) as caught:
        replica.require_ready()
    assert isinstance(caught.value.failure, Unavailable)
    with pytest.raises(Refused) as caught:
        await replica.sleep()
    assert isinstance(caught.value.failure, Conflict)
    for other in ({"tenant": "other"}, {"model": "other"}, {"version": "f" * 64}):
        with pytest.raises(Refused) as caught:
            await replica.wake(msgspec.structs.replace(BIND, **other))
        assert isinstance(caught.value.failure, Conflict)
    bound = await replica.wake(msgspec.structs.replace(BIND, device_class="cpu-9", threads=2))
    assert (bound.max_streams, bound.bytes_by_tier) == (8, {})
    assert metered_phase(tmp_path) is Phase.IDLE
    assert replica.report().device_class == BIND.device_class, "a replica is billed by one device class"
    assert replica.report().threads == 2, "the threads of the wake"
    assert replica.require_ready()[0].bind.device_class == BIND.device_class
    await replica.close()


async def test_busy_replica_does_not_sleep(tmp_path: Path) -> None:
    """A refused sleep changes nothing."""
    engine = ScriptedEngine(script_of("hello"), paced=True)
    replica = replica_of(tmp_path, fake_work(engine))
    await replica.bind(BIND)
    serving, streams = replica.require_ready()
    body = b'{"prompt": "Once", "max_tokens": 3}'
    prepared = await serving.prepare("/v1/completions", body, "r", 0)
    stream = streams.open(prepared.request)
    with pytest.raises(Refused) as caught:
        await replica.sleep()
    assert isinstance(caught.value.failure, Conflict)
    assert replica.state is RuntimeState.READY
    stream.stop()
    engine.run_freely()
    await replica.close()


async def test_unverified_replica_does_not_sleep(tmp_path: Path) -> None:
    """A replica that has not reproduced its known answers refuses to sleep and stays ready."""
    engine = ScriptedEngine(script_of("hello"))
    replica = replica_of(tmp_path, fake_work(engine))
    await replica.bind(BIND)
    engine.needs_probe = True  # it runs 0.25 s later at the earliest
    with pytest.raises(Refused) as caught:
        await replica.sleep()
    assert isinstance(caught.value.failure, Conflict)
    assert replica.state is RuntimeState.READY
    await replica.close()


async def test_failed_wake_fails_the_replica(tmp_path: Path) -> None:
    """A failed wake returns its failure, and the process may exit."""

    def lost(request: BindRequest, callbacks: EngineCallbacks) -> ServedDecoder:
        raise Refused(ChunkMissing("ab"))

    replica = replica_of(tmp_path, fake_work(ScriptedEngine(script_of("hello")), resume=lost))
    await replica.bind(BIND)
    await replica.sleep()
    with pytest.raises(Refused) as caught:
        await replica.wake(BIND)
    assert caught.value.failure == ChunkMissing("ab")
    assert replica.failure == ChunkMissing("ab")
    assert replica.may_exit.is_set()
    await replica.close()


async def test_replica_without_weights_wakes_to_its_own_version(tmp_path: Path) -> None:
    """Without weights the replica has no lease, accepts no other version, and reports its bytes again after a wake."""
    replica = replica_of(tmp_path)
    await replica.bind(BIND)
    with pytest.raises(Refused) as caught:
        await replica.release_weights()
    assert isinstance(caught.value.failure, Conflict), "a replica must sleep first"
    await replica.sleep()
    await replica.release_weights()
    report = replica.report()
    assert (report.state, report.version, report.leases) == (RuntimeState.DEEP_SLEEP, BIND.version, 0)
    assert metered_phase(tmp_path) is Phase.STANDBY
    with pytest.raises(Refused):
        await replica.sleep()
    with pytest.raises(Refused) as caught:
        await replica.wake(msgspec.structs.replace(BIND, version="f" * 64))
    assert isinstance(caught.value.failure, Conflict)
    await replica.wake(BIND)
    assert metered_phase(tmp_path) is Phase.IDLE
    assert replica.report().leases == 1
    await replica.close()


@pytest.mark.parametrize("failure", [Internal(), None], ids=["refused", "an exception"])
async def test_failed_release_of_weights_fails_the_replica(tmp_path: Path, failure: Failure | None) -> None:
    """A replica that still maps memory to be released must not serve again."""

    def fail() -> None:
        raise Refused(failure) if failure is not None else RuntimeError("bug")

    replica = replica_of(tmp_path, fake_work(ScriptedEngine(script_of("hello")), release_weights=fail))
    await replica.bind(BIND)
    await replica.sleep()
    with pytest.raises((Refused, RuntimeError)):
        await replica.release_weights()
    assert replica.failure == Internal()
    assert replica.may_exit.is_set()
    with pytest.raises(Refused):
        await replica.wake(BIND)
    await replica.close()


async def test_replica_that_cannot_suspend_fails(tmp_path: Path) -> None:
    """A replica that can't free its device memory fails, since its slot would go to another version."""

    def fail() -> None:
        raise RuntimeError("a device that lost its context")

    replica = replica_of(tmp_path, fake_work(ScriptedEngine(script_of("hello")), suspend=fail))
    await replica.bind(BIND)
    with pytest.raises(RuntimeError):
        await replica.sleep()
    assert replica.failure == Internal()
    assert replica.state is RuntimeState.FAILED
    assert replica.may_exit.is_set()
    await replica.close()


async def test_wake_waits_for_release_of_weights(tmp_path: Path) -> None:
    """A release and a wake run one after the other. A release after the wake is refused."""
    inside, may_end = threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        assert may_end.wait(20)

    replica = replica_of(tmp_path, fake_work(ScriptedEngine(script_of("hello")), release_weights=slow))
    await replica.bind(BIND)
    await replica.sleep()
    releasing = asyncio.create_task(replica.release_weights())
    await asyncio.to_thread(inside.wait, 20)
    waking, late = asyncio.create_task(replica.wake(BIND)), asyncio.create_task(replica.release_weights())
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait_for(asyncio.gather(releasing, waking), 20)
    with pytest.raises(Refused) as caught:
        await asyncio.wait_for(late, 20)
    assert isinstance(caught.value.failure, Conflict)
    assert replica.state is RuntimeState.READY
    await replica.close()


async def test_sleeping_replica_drains_at_once(tmp_path: Path) -> None:
    replica = replica_of(tmp_path)
    await replica.bind(BIND)
    await replica.sleep()
    replica.drain()
    assert replica.may_exit.is_set()
    assert replica.failure is None
    await replica.close()


async def test_gate_leaves_the_standby_unbound(tmp_path: Path) -> None:
    """A gate leaves no tenant's data in the standby, so it can still take any version."""
    replica = replica_of(
        tmp_path, ReplicaOperations(fake_work(ScriptedEngine(script_of("x"))).restore, _refuse_gate, _refuse_seal)
    )
    for _ in range(2):
        with pytest.raises(Refused):
            await replica.gate(GateJob(config_json="{}", tensors={}))
    assert replica.state is RuntimeState.STANDBY
    await replica.bind(BIND)
    await replica.close()


async def test_standby_with_a_gate_job_reports_restoring(tmp_path: Path) -> None:
    """A standby that runs a gate job reports RESTORING, so that a new control plane does not bind it."""
    began, may_end = threading.Event(), threading.Event()

    def gate(job: GateJob) -> GateFacts:
        began.set()
        may_end.wait(60)
        return _refuse_gate(job)

    replica = replica_of(
        tmp_path, ReplicaOperations(fake_work(ScriptedEngine(script_of("x"))).restore, gate, _refuse_seal)
    )
    gating = asyncio.create_task(replica.gate(GateJob(config_json="{}", tensors={})))
    await asyncio.to_thread(began.wait)
    assert replica.report().state is RuntimeState.RESTORING
    may_end.set()
    with pytest.raises(Refused):
        await gating
    assert replica.report().state is RuntimeState.STANDBY
    await replica.close()


async def test_standby_with_a_waiting_order_reports_restoring(tmp_path: Path) -> None:
    """A standby whose bind waits for a warm-up step reports RESTORING."""
    began, may_end = threading.Event(), threading.Event()

    def step() -> None:
        began.set()
        may_end.wait(60)

    work = fake_work(ScriptedEngine(script_of("x")))
    replica = replica_of(tmp_path, ReplicaOperations(work.restore, _refuse_gate, _refuse_seal, warm_up=(step,)))
    warming = asyncio.create_task(replica.warm_up(0.0))
    await asyncio.to_thread(began.wait)
    assert replica.report().state is RuntimeState.STANDBY
    binding = asyncio.create_task(replica.bind(BIND))
    await asyncio.sleep(0)
    assert replica.report().state is RuntimeState.RESTORING
    may_end.set()
    await binding
    assert replica.report().state is RuntimeState.READY
    await warming
    await replica.close()


async def test_seal_ends_the_standby(tmp_path: Path) -> None:
    """After a seal, successful or not, the standby takes no version, because it held a tenant's bytes."""
    replica = replica_of(
        tmp_path, ReplicaOperations(fake_work(ScriptedEngine(script_of("x"))).restore, _refuse_gate, _refuse_seal)
    )
    with pytest.raises(Refused):
        await replica.seal(SealJob(tenant="acme", version="ab" * 32))
    assert replica.may_exit.is_set()
    assert replica.state is RuntimeState.DRAINING
    with pytest.raises(Refused):
        await replica.bind(BIND)
    assert metered_phase(tmp_path) is Phase.STANDBY, "the platform's cost"


async def test_a_parked_standby_drains_at_once(tmp_path: Path) -> None:
    """It has nothing to finish, and a second drain changes nothing."""
    replica = replica_of(tmp_path)
    replica.drain()
    replica.drain()
    assert replica.may_exit.is_set()
    with pytest.raises(Refused):
        await replica.bind(BIND)


@pytest.mark.parametrize("has_device_copies", [False, True])
async def test_damaged_weights_fail_or_drain_the_replica(tmp_path: Path, has_device_copies: bool) -> None:
    """Over host memory the replica fails, over device copies it drains. A standby refuses."""
    plain = fake_work(ScriptedEngine(script_of("hello")))

    def restore(request: BindRequest, callbacks: EngineCallbacks) -> ServedVersion:
        served = plain.restore(request, callbacks)
        assert isinstance(served, ServedDecoder)
        assert served.suspend_handle is not None
        return replace(served, suspend_handle=replace(served.suspend_handle, has_device_copies=has_device_copies))

    replica = replica_of(tmp_path, replace(plain, restore=restore))
    with pytest.raises(Refused) as caught:
        replica.stop_damaged()
    assert isinstance(caught.value.failure, Conflict)
    await replica.bind(BIND)
    replica.stop_damaged()
    assert replica.state is (RuntimeState.DRAINING if has_device_copies else RuntimeState.FAILED)
    assert replica.failure == (None if has_device_copies else WeightsDamaged(BIND.version))
    assert replica.may_exit.is_set(), "it has nothing to finish"
    await replica.close()


async def test_bind_waits_for_one_warm_up_step(tmp_path: Path) -> None:
    """A bind waits for the current warm-up step only."""
    inside, may_end = threading.Event(), threading.Event()
    done: list[str] = []

    def first() -> None:
        inside.set()
        assert may_end.wait(20)
        done.append("first")

    def second() -> None:
        done.append("second")

    restore = fake_work(ScriptedEngine(script_of("x"))).restore
    replica = replica_of(tmp_path, ReplicaOperations(restore, _refuse_gate, _refuse_seal, (first, second)))
    warming = asyncio.create_task(replica.warm_up(0))
    await asyncio.to_thread(inside.wait, 20)
    binding = asyncio.create_task(replica.bind(BIND))
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait_for(asyncio.gather(binding, warming), 20)
    assert done == ["first"]
    assert replica.state is RuntimeState.READY
    await replica.close()


async def test_failed_warm_up_leaves_a_working_standby(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("bug")

    work = fake_work(ScriptedEngine(script_of("x")))
    replica = replica_of(tmp_path, ReplicaOperations(work.restore, _refuse_gate, _refuse_seal, (fail, fail)))
    await replica.warm_up(0)
    assert replica.state is RuntimeState.STANDBY
    await replica.bind(BIND)
    await replica.close()


@pytest.mark.parametrize("state", list(RuntimeState))
@pytest.mark.parametrize("to", list(RuntimeState))
async def test_illegal_transition_raises_and_changes_nothing(
    tmp_path: Path, state: RuntimeState, to: RuntimeState
) -> None:
    """A transition outside the table raises."""
    replica = replica_of(tmp_path)
    replica._state = state
    if to in TRANSITIONS[state]:
        replica._transition(to)
        assert replica.state is to
    else:
        with pytest.raises(Refused):
            replica._transition(to)
        assert replica.state is state
