"""The loops of a runtime: errors in them, the start of a pod, and the upload of recorded known answers."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kelvin.contracts.artifact_errors import ProbeFailed
from kelvin.contracts.artifacts.push_api import KeepSeal
from kelvin.contracts.artifacts.runtime_control import BindRequest, Pod, RuntimeReport, RuntimeState, SealAttestation
from kelvin.contracts.errors import Failure, Internal, NotFound, Refused, Unavailable
from kelvin.devices.gpu_policy import CudaVisibility
from kelvin.ipc.peer_settings import LOCAL_ONLY
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.tcp_listener import listen
from kelvin.process.startup import BAD_SETTING_STATUS
from runtime.api.control_api import build_control_app
from runtime.app import app, pod, preload
from runtime.app.app import ReplicaProcess, upload_recorded_seal
from runtime.app.settings import RuntimeSettings
from runtime.lifecycle.meter_writer import create_meter_page
from runtime.lifecycle.replica import RuntimeReplica
from runtime.surface.served_version import EngineCallbacks, ServedDecoder
from tests.eventually import eventually
from tests.runtime.fakes import BIND, fake_work, replica_of, script_of
from tests.runtime.scripted_engine import DEADLINE_S, ScriptedEngine
from tests.weightcache.kit import attestation_of

NAME = "rt-1.sock"


async def test_error_in_a_loop_leaves_the_runtime_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed watch or upload loop does not end a parked standby."""
    errors = [ValueError("watch"), ValueError("keep")]

    async def fails(*_: object) -> None:
        if errors:
            raise errors.pop()
        await asyncio.Event().wait()

    monkeypatch.setattr(RuntimeReplica, "watch", fails)
    monkeypatch.setattr(app, "_WARM_UP_DELAY_S", 3600.0)
    monkeypatch.setattr(app, "upload_recorded_seal", fails)

    stop, directory = asyncio.Event(), SocketDirectory(tmp_path / "run")
    settings = RuntimeSettings(tmp_path, None, drain_s=1, restore_s=1.0, step_s=1.0)
    meter = create_meter_page(settings.meters, "rt-1")
    listener = directory.listen(NAME)
    process = ReplicaProcess("rt-1", directory, listener, meter, build_control_app())
    serving = asyncio.create_task(app.serve(process, settings, stop))
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


async def test_defect_in_a_pods_restore_ends_it_as_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in a pod's restore, such as MemoryError, ends the pod like any failed restore."""

    def restore(bind: BindRequest, callbacks: EngineCallbacks) -> ServedDecoder:
        raise MemoryError

    work = replace(fake_work(ScriptedEngine(script_of("x"))), restore=restore)
    monkeypatch.setattr(app, "build_operations", lambda *_: work)
    monkeypatch.setattr(app, "_WARM_UP_DELAY_S", 3600.0)
    directory = SocketDirectory(tmp_path / "run")
    settings = RuntimeSettings(tmp_path, None, drain_s=1, restore_s=1.0, step_s=1.0)
    meter = create_meter_page(settings.meters, "rt-1")
    spec = Pod(runtime_id="rt-1", host="127.0.0.1", port=0, bind=BIND)
    with directory.listen(NAME) as listener:
        process = ReplicaProcess("rt-1", directory, listener, meter, build_control_app(), pod=spec)
        with pytest.raises(Refused) as caught:
            await app.serve(process, settings, asyncio.Event())
    assert caught.value.failure == Internal()
    directory.close()


async def test_defect_before_a_pods_restore_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect before the restore ends the pod, which would otherwise wait for a version for ever."""
    monkeypatch.setattr(app, "build_operations", lambda *_: fake_work(ScriptedEngine(script_of("x"))))
    monkeypatch.setattr(app, "_WARM_UP_DELAY_S", 3600.0)
    directory = SocketDirectory(tmp_path / "run")
    settings = RuntimeSettings(tmp_path, None, drain_s=1, restore_s=1.0, step_s=1.0)
    meter = create_meter_page(settings.meters, "rt-1")
    spec = Pod(runtime_id="rt-1", host="127.0.0.1", port=0, bind=msgspec.structs.replace(BIND, model="m" * 65))
    with directory.listen(NAME) as listener:
        process = ReplicaProcess("rt-1", directory, listener, meter, build_control_app(), pod=spec)
        with pytest.raises(Refused) as caught:
            await asyncio.wait_for(app.serve(process, settings, asyncio.Event()), 10)
    assert caught.value.failure == Internal()
    directory.close()


@pytest.mark.parametrize(
    ("is_taken", "status"),
    [pytest.param(True, BAD_SETTING_STATUS, id="taken"), pytest.param(False, 1, id="the control")],
)
def test_pod_whose_address_is_taken_ends_as_by_a_bad_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_taken: bool, status: int
) -> None:
    """A used address ends the pod with the status of a bad setting, so it is not retried. The control fails later."""
    monkeypatch.setattr(preload, "import_all", lambda: None)
    monkeypatch.setattr(pod, "_try_connect_agent", lambda *_: SocketDirectory(tmp_path / "agent"))
    monkeypatch.setattr(pod, "run_service", lambda serve, _: asyncio.run(serve(asyncio.Event())))
    failure = Unavailable("the cache agent")
    monkeypatch.setattr(app, "build_operations", lambda *_: fake_work(ScriptedEngine(script_of("x")), failure=failure))
    with listen("127.0.0.1", 0) as taken:
        health = taken.getsockname()[:2] if is_taken else None
        settings = RuntimeSettings(
            tmp_path, None, drain_s=1, restore_s=1.0, peer_settings=replace(LOCAL_ONLY, health=health)
        )
        spec = Pod(runtime_id="rt-1", host="127.0.0.1", port=0, bind=BIND)
        assert pod.run(settings, spec, CudaVisibility()) == status


SEAL = attestation_of(BIND.version)


class HeldProbeEngine(ScriptedEngine):
    """An engine whose probe waits for permission, and may fail."""

    def __init__(self) -> None:
        super().__init__(script_of("x"))
        self.needs_probe = True
        self.may_probe = threading.Event()

    def run_probe_alone(self) -> Failure | None:
        assert self.may_probe.wait(DEADLINE_S)
        self.poisoned = self.probe_failure  # before the probe ends, like real engines
        return super().run_probe_alone()


@asynccontextmanager
async def replica_with(
    tmp_path: Path, engine: HeldProbeEngine, recorded: SealAttestation | None
) -> AsyncIterator[tuple[RuntimeReplica, "asyncio.Queue[KeepSeal]", "list[Exception]"]]:
    """A bound replica beside its upload task. Yields the uploads, and the failures of the next uploads."""
    plain = fake_work(engine)

    def restore(bind: BindRequest, callbacks: EngineCallbacks) -> ServedDecoder:
        serving = plain.restore(bind, callbacks)
        assert isinstance(serving, ServedDecoder)
        return replace(serving, recorded_seal=recorded)

    replica = replica_of(tmp_path, replace(plain, restore=restore))
    uploads: asyncio.Queue[KeepSeal] = asyncio.Queue()
    failures: list[Exception] = []

    async def upload(seal: KeepSeal) -> None:
        if failures:
            raise failures.pop(0)
        uploads.put_nowait(seal)

    task = asyncio.create_task(upload_recorded_seal(replica, upload))
    try:
        await replica.bind(BIND)
        yield replica, uploads, failures
        await asyncio.wait_for(task, 30)
    finally:
        task.cancel()
        await replica.close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_SEAL_POLL_S", 0.001)
    monkeypatch.setattr(app, "_SEAL_PAUSES_S", (0.001, 0.001))


async def test_recorded_seal_is_uploaded_once_verified(tmp_path: Path) -> None:
    """The seal is uploaded once proven, with the tenant. An unavailable snapshotter is tried again."""
    engine = HeldProbeEngine()
    async with replica_with(tmp_path, engine, SEAL) as (replica, uploads, failures):
        failures.append(Refused(Unavailable("the snapshotter")))
        assert replica.verified_seal is None
        assert replica.may_record_answers
        assert uploads.empty()
        engine.may_probe.set()
        assert await asyncio.wait_for(uploads.get(), 30) == KeepSeal(tenant=BIND.tenant, seal=SEAL)
    assert uploads.empty()
    assert failures == []


async def test_known_answers_are_not_uploaded_again(tmp_path: Path) -> None:
    engine = HeldProbeEngine()
    async with replica_with(tmp_path, engine, None) as (_, uploads, _failures):
        engine.may_probe.set()
    assert uploads.empty()


async def test_answers_that_are_not_reproduced_are_not_uploaded(tmp_path: Path) -> None:
    """Negative control: a replica that failed its own known answers uploads nothing."""
    engine = HeldProbeEngine()
    engine.probe_failure = ProbeFailed(BIND.version, "position 0 is off")
    async with replica_with(tmp_path, engine, SEAL) as (replica, uploads, _):
        engine.may_probe.set()
        watch = asyncio.create_task(replica.watch())
        await asyncio.wait_for(replica.may_exit.wait(), DEADLINE_S)
        watch.cancel()
    assert uploads.empty()


@pytest.mark.parametrize(
    ("failure", "left"),
    [
        pytest.param(Unavailable("the snapshotter"), 1, id="away for too long"),
        pytest.param(NotFound("version", "x"), 3, id="it does not want it"),
    ],
)
async def test_seal_upload_stops_after_three_tries(tmp_path: Path, failure: Unavailable | NotFound, left: int) -> None:
    """An upload stops after three tries, or at once if a retry can't help."""
    engine = HeldProbeEngine()
    async with replica_with(tmp_path, engine, SEAL) as (_, uploads, failures):
        failures.extend(Refused(failure) for _ in range(4))
        engine.may_probe.set()
    assert uploads.empty()
    assert len(failures) == left
