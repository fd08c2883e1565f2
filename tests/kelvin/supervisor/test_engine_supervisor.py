"""`kelvin engine` runs or refuses push jobs, even if its processes die, and leaves none behind. Real processes."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from kelvin.contracts.artifacts.runtime_control import ENGINE_SOCKET, GateFacts, GateJob, SealAttestation, SealJob
from kelvin.contracts.errors import Failure, Refused, RemoteFailure, Unavailable
from kelvin.ipc.http_bodies import SMALL_BYTES
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from snapshotter.push.gate_jobs import StandaloneEngine
from tests.kelvin.pods import child_of, kelvin, was_probed
from tests.process_state import has_ended
from tests.runtime.processes import DEADLINE_S, Installation, poll_until
from tests.runtime.versions import make_llama
from tests.weightcache.kit import TENANT, Version

GATE: Final = GateJob(config_json="{}", tensors={})  # the engine rejects this job, which shows that the gate works
PROCESSES: Final = ("runtime.app.zygote", "weightcache")


@contextmanager
def engine(
    house: Installation, data: Path, *, ends: bool = True, ended_by: signal.Signals = signal.SIGTERM, **more: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the command over the installation's store. At the end it must exit with 0 and without a traceback."""
    settings = {"KELVIN_NVME_BYTES": "0"} | more
    with kelvin(house, "engine", "--data", str(data), settings=settings) as process:
        yield process
        if ends:
            process.send_signal(ended_by)
            assert process.wait(DEADLINE_S) == 0


def is_ready(data: Path) -> bool | None:
    """Return True if the readiness probe succeeds, otherwise None."""

    async def ask() -> bool | None:
        with closing(SocketDirectory(data / "run", is_ours=False)) as directory:
            client = ServiceClient(directory, ENGINE_SOCKET, "the engine")
            try:
                async with client.open("GET", "/readyz", timeout_s=DEADLINE_S):
                    return True
            finally:
                await client.close()

    try:
        return asyncio.run(ask())
    except (OSError, Refused):
        return None


def gate(data: Path) -> Failure:
    """Return the failure with which GATE is refused."""
    judge = StandaloneEngine(data / "run")
    with pytest.raises(Refused) as refused:
        asyncio.run(judge.call("POST", "/internal/v1/jobs/gate", GateFacts, body=GATE, timeout_s=DEADLINE_S))
    return refused.value.failure


def seal(data: Path, version: str) -> SealAttestation:
    """Run a seal job, as a snapshotter does."""
    job = SealJob(tenant=TENANT, version=version)
    judge = StandaloneEngine(data / "run")
    return asyncio.run(judge.call("POST", "/internal/v1/jobs/seal", SealAttestation, body=job, timeout_s=DEADLINE_S))


def seal_in_the_end(data: Path, version: Version) -> SealAttestation:
    """Run a seal job and retry it while that may help: a standby on a busy machine may start too late."""

    def sealed() -> SealAttestation | None:
        try:
            return seal(data, version.id)
        except Refused as refused:
            if not may_be_repeated(refused.failure):
                raise
            return None

    return poll_until("it is sealed", sealed)


def is_judged(data: Path) -> bool | None:
    """Return True if the gate rejected the job. Any other failure must be retryable."""
    found = gate(data)
    if isinstance(found, RemoteFailure) and found.remote_code == "artifact_rejected":
        return True
    assert may_be_repeated(found), found
    return None


def may_be_repeated(failure: Failure) -> bool:
    return isinstance(failure, Unavailable) or (isinstance(failure, RemoteFailure) and failure.remote_retryable)


def another(process: "subprocess.Popen[bytes]", module: str, killed: int) -> int | None:
    """Return the process id of the process that replaced `killed`, or None."""
    return None if (found := child_of(process, module)) == killed else found


def test_engine_runs_gate_and_seal_jobs(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """The gate rejects a job, a seal is attested, and no standby file is left. A body too large is refused."""
    house, version = sealed
    data = tmp_path / "engine"
    assert gate(data) == Unavailable("the engine")  # the control: no other process responds
    with engine(house, data):
        poll_until("it is ready", lambda: is_ready(data))
        poll_until("the gate speaks", lambda: is_judged(data))
        attestation = seal_in_the_end(data, version)
        assert attestation.version == version.id
        assert attestation.probe.token_ids
        poll_until("its pages are gone", lambda: not list((data / "run" / "meters").glob("*")) or None)
        assert list((data / "run").glob("rt-*")) == []
        with pytest.raises(Refused) as refused:
            seal(data, "v" * SMALL_BYTES)
        assert isinstance(refused.value.failure, RemoteFailure)
        assert refused.value.failure.remote_code == "request_too_large"
    assert gate(data) == Unavailable("the engine")  # its socket file still exists


@pytest.mark.deep
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGHUP])
def test_end_under_a_job_leaves_no_traceback(
    sealed: tuple[Installation, Version], tmp_path: Path, ended_by: signal.Signals
) -> None:
    """No process logs a traceback, whichever signal ends the engine. `engine` checks the log."""
    house, version = sealed
    data = tmp_path / "engine"
    with ThreadPoolExecutor(1) as beside, engine(house, data, ended_by=ended_by):
        poll_until("it is ready", lambda: is_ready(data))
        sealing = beside.submit(seal, data, version.id)
        poll_until("a standby works", lambda: list((data / "run" / "meters").glob("*")) or None)
    assert sealing.done()


def test_dead_engine_processes_are_restarted(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """After the zygote or the cache agent dies, jobs are refused as retryable and then work again. The job of a killed
    standby runs on another one, or is retryable."""
    house, version = sealed
    data = tmp_path / "engine"
    with engine(house, data) as process, ThreadPoolExecutor(1) as beside:
        poll_until("it is ready", lambda: is_ready(data))
        for module in PROCESSES:
            killed = child_of(process, module)
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            poll_until("another one", partial(another, process, module, killed))
            poll_until("the gate speaks", lambda: is_judged(data))
            poll_until("it is ready", lambda: is_ready(data))
        job = beside.submit(seal, data, version.id)
        pages = data / "run" / "meters"
        page = poll_until("a standby", lambda: next(pages.glob("*.push-*"), None))
        os.kill(int(page.name.partition(".")[0]), signal.SIGKILL)
        try:
            assert job.result(DEADLINE_S).version == version.id  # another standby ran it
        except Refused as refused:  # the standby was killed before it had the job
            failure = refused.failure
            assert isinstance(failure, RemoteFailure)
            assert (failure.remote_code, failure.remote_retryable) == ("unavailable", True)
        assert seal_in_the_end(data, version).version == version.id


@pytest.mark.deep
def test_hung_processes_are_replaced(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """The zygote and the cache agent hang at the same time. Both are replaced, and a later seal succeeds."""
    house, version = sealed
    data = tmp_path / "engine"
    with engine(house, data) as process:
        poll_until("it is ready", lambda: is_ready(data))
        hung = {module: pid for module in PROCESSES if (pid := child_of(process, module)) is not None}
        poll_until("the watchdog has asked them", lambda: all(map(was_probed, hung.values())) or None)
        for pid in hung.values():
            os.kill(pid, signal.SIGSTOP)
        for module in PROCESSES:
            poll_until(f"another {module}", partial(another, process, module, hung[module]))
        poll_until("it is ready", lambda: is_ready(data))
        assert seal_in_the_end(data, version).version == version.id


def test_killed_engine_leaves_no_processes(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """Child processes end with the engine. An engine started over its leftovers works."""
    house, version = sealed
    data = tmp_path / "engine"
    with engine(house, data, ends=False) as process:
        poll_until("it is ready", lambda: is_ready(data))
        pids = [pid for module in PROCESSES if (pid := child_of(process, module)) is not None]
        assert len(pids) == len(PROCESSES)
        assert not any(map(has_ended, pids))
        process.kill()
        poll_until("they are dead", lambda: all(map(has_ended, pids)) or None)
    assert gate(data) == Unavailable("the engine")
    (data / "run" / "rt-push-left.sock").touch()
    with engine(house, data):
        poll_until("it is ready", lambda: is_ready(data))
        assert list((data / "run").glob("rt-*")) == []
        assert seal_in_the_end(data, version).version == version.id


def test_second_engine_in_a_directory_is_refused(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """A second engine exits with 1, and the first one continues."""
    house, _ = sealed
    data = tmp_path / "engine"
    with engine(house, data):
        poll_until("it is ready", lambda: is_ready(data))
        with engine(house, data, ends=False) as second:
            assert second.wait(DEADLINE_S) == 1
        poll_until("the gate of the first speaks", lambda: is_judged(data))


def test_refused_setting_ends_the_engine_with_2(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """Exit status 2 means that a restart would fail in the same way."""
    house, _ = sealed
    with engine(house, tmp_path / "engine", ends=False, KELVIN_SLAB_BYTES="5") as process:
        assert process.wait(DEADLINE_S) == 2


def test_job_that_does_not_fit_is_refused_for_good(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """The refusal is not retryable. A smaller version is still sealed."""
    house, version = sealed
    data = tmp_path / "engine"
    large = house.publish(make_llama(seed=6, intermediate_size=1 << 14))
    with engine(house, data, KELVIN_HOST_BYTES=str(8 << 20)):
        poll_until("it is ready", lambda: is_ready(data))
        with pytest.raises(Refused) as refused:
            seal(data, large.id)
        failure = refused.value.failure
        assert isinstance(failure, RemoteFailure)
        assert (failure.remote_code, failure.remote_retryable) == ("capacity_exceeded", False)
        assert seal_in_the_end(data, version).version == version.id
