"""A restore overlaps steps that need no bytes with the load, and then serves or fails like any other."""

import asyncio
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kelvin.blobstore.file_store import FileStore
from kelvin.contracts.artifacts.object_keys import attestation_key
from kelvin.contracts.artifacts.runtime_control import BindRequest, SealAttestation
from kelvin.contracts.errors import Refused
from kelvin.contracts.timeline import Stage
from kelvin.contracts.wire import encode
from runtime.app.replica_operations import build_operations
from runtime.lifecycle import version_restore as module
from runtime.surface.served_version import ServedVersion
from tests.runtime.driving import EventRecorder
from tests.runtime.restoring import generate, sealed_lease
from tests.runtime.versions import MemoryLease, make_llama
from tests.weightcache.kit import HUGE, TENANT, HeldStore, RunningAgent, run_agent, settings_of
from weightcache.client import lease as client
from weightcache.client.lease import Lease
from weightcache.sources.source import is_digest_of

VERSION = make_llama(seed=3)
CHUNKS = {chunk.digest: chunk.length for chunk in VERSION.manifest.chunks}  # in the order of the pack, each once
LAST = list(CHUNKS)[-1]
HALF = sum(CHUNKS.values()) - CHUNKS[LAST]
DEADLINE_S = 60.0
BIND = BindRequest(tenant=TENANT, model="m", version=VERSION.id, device_class="cpu-1", threads=1, kv_bytes=1 << 20)


@pytest.fixture(scope="module")
def attestation() -> SealAttestation:
    return sealed_lease(MemoryLease(VERSION)).attestations[0]


@pytest.fixture(autouse=True)
def _closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close leases and undo the memory limit, which a runtime would keep for life."""
    bound = resource.getrlimit(resource.RLIMIT_DATA)
    leases: list[Lease] = []
    acquire = client.acquire

    def noting(*args: Any, **kwargs: Any) -> Lease:
        leases.append(acquire(*args, **kwargs))
        return leases[-1]

    monkeypatch.setattr(client, "acquire", noting)
    yield
    for lease in leases:
        lease.close()
    resource.setrlimit(resource.RLIMIT_DATA, bound)


class Progress:
    """Records the steps that a restore finished before it first waited for all bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = threading.Event()
        self.done: list[str] = []
        wait_until_whole = Lease.wait_until_whole

        def waiting(lease: Lease) -> None:
            self.asked.set()
            wait_until_whole(lease)

        monkeypatch.setattr(Lease, "wait_until_whole", waiting)
        for name in ("bind_verified", "ModelEngine", "TextCodec"):
            monkeypatch.setattr(module, name, self._noting(name, getattr(module, name)))

    def _noting(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            if not self.asked.is_set():
                self.done.append(name)
            return made

        return noting


@contextmanager
def held(tmp_path: Path, seal: SealAttestation, *, right: bool = True) -> Iterator[tuple[RunningAgent, HeldStore]]:
    """An agent that lacks the version's last chunk until the gate opens; with `right=False` that chunk is corrupt."""
    store = HeldStore(FileStore(tmp_path / "store"), HALF)
    settings = settings_of(tmp_path, slabs=4, slab_bytes=8 * HUGE)
    with run_agent(settings, store, verify=lambda data, it: is_digest_of(data, it) and (right or it != LAST)) as agent:
        agent.publish(VERSION)
        key = attestation_key(TENANT, VERSION.id, seal.fingerprint)
        asyncio.run(agent.store.put_if_absent(key, encode(seal)))
        try:
            yield agent, store
        finally:
            store.gate.set()


def _greedy(served: ServedVersion, recorder: EventRecorder) -> list[int]:
    generate(served, recorder, tokens=8)
    assert served.thread.stop(DEADLINE_S)
    return recorder.tokens


@pytest.mark.parametrize(
    ("fast_bind", "beside"),
    [
        pytest.param(True, ["bind_verified", "TextCodec", "ModelEngine"], id="fast bind, which reads nothing"),
        pytest.param(False, [], id="control: library bind, which may read all"),
    ],
)
def test_progressive_restore_overlaps_the_load(
    tmp_path: Path, attestation: SealAttestation, monkeypatch: pytest.MonkeyPatch, fast_bind: bool, beside: list[str]
) -> None:
    """Model, engine and tokenizer are ready before the last bytes, and the tokens are those of a whole load."""
    progress, recorder = Progress(monkeypatch), EventRecorder()
    seal = msgspec.structs.replace(attestation, fast_bind=fast_bind)
    with held(tmp_path, seal) as (agent, store), ThreadPoolExecutor(1) as threads:
        work = build_operations(agent.directory, DEADLINE_S)
        restoring = threads.submit(work.restore, BIND, recorder.callbacks)
        assert progress.asked.wait(DEADLINE_S)
        assert progress.done == beside
        assert not restoring.done()
        state = agent.wait_for("all but the last are there", lambda state: state.host.loading == 1)
        assert (state.leases, state.leases_granted) == (1, 0)
        store.gate.set()
        served = restoring.result(DEADLINE_S)
        stages = [span.stage for span in served.spans]
        assert stages == [Stage.LEASED, Stage.BOUND, Stage.READY]
        assert [span.after_us for span in served.spans] == sorted(span.after_us for span in served.spans)
        assert sum(served.bytes_by_tier.values()) == sum(CHUNKS.values())
        tokens = _greedy(served, recorder)
        again = EventRecorder()
        whole = work.restore(BIND, again.callbacks)
        assert _greedy(whole, again) == tokens


def test_bytes_that_are_wrong_after_the_lease(
    tmp_path: Path, attestation: SealAttestation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that turns out corrupt after the lease fails the restore with its name."""
    progress = Progress(monkeypatch)
    with held(tmp_path, attestation, right=False) as (agent, store), ThreadPoolExecutor(1) as threads:
        work = build_operations(agent.directory, DEADLINE_S)
        restoring = threads.submit(work.restore, BIND, EventRecorder().callbacks)
        assert progress.asked.wait(DEADLINE_S)
        store.gate.set()
        with pytest.raises(Refused, match=LAST) as refused:
            restoring.result(DEADLINE_S)
        assert refused.value.failure.code == "chunk_corrupt"
        agent.wait_for("the lease is over", lambda state: state.leases == 0)
