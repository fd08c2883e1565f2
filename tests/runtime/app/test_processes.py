"""From a fork to an answer and the end, with real processes: zygote, standby, cache agent and engine."""

import asyncio
import json
import resource
import signal
from pathlib import Path

import aiohttp
import pytest

from kelvin.contracts.accounting.meter_format import Phase
from kelvin.contracts.artifacts.runtime_control import RuntimeState
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.stream_frames import Frame, FrameDecoder, FrameKind
from kelvin.contracts.timeline import Stage
from kelvin.ipc.service_client import ServiceClient
from runtime.app.process_memory import SPARE_BYTES
from tests.runtime.processes import DEADLINE_S, KV_BYTES, Installation, Standby, poll_until, run_installation
from tests.runtime.versions import make_llama
from tests.weightcache.kit import TENANT, Version, evict

PROMPT = {"prompt": [0, 7, 9, 11], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def version(installation: Installation) -> Version:
    """A sealed version. Its seal ran on a standby, which ended with it."""
    version = installation.publish(make_llama(seed=5))
    standby = installation.fork()
    attestation = standby.seal(version)
    assert attestation.fast_bind
    assert standby.reap() == 0
    return version


def _bound(installation: Installation, version: Version) -> Standby:
    standby = installation.fork()
    standby.bind(version)
    return standby


def _text(frames: list[Frame]) -> str:
    data = b"".join(frame.payload for frame in frames if frame.kind is FrameKind.DATA)
    return str(json.loads(data)["choices"][0]["text"])


def test_a_standby_becomes_a_runtime_and_answers(installation: Installation, version: Version) -> None:
    """A standby binds from the cache's memory with stages in order, and each runtime gives the same answer."""
    standby = installation.fork()
    bound = standby.bind(version)
    assert [span.stage for span in bound.spans] == [Stage.LEASED, Stage.BOUND, Stage.READY]
    report = standby.report()
    assert (report.state, report.leases, report.version) == (RuntimeState.READY, 1, version.id)
    frames = standby.answer(PROMPT)
    assert frames[-1].kind is FrameKind.END
    assert frames[-1].counts.completion_tokens == 12
    assert _text(standby.answer(PROMPT, "r2")) == _text(frames)
    other = _bound(installation, version)
    assert _text(other.answer(PROMPT)) == _text(frames)
    for each in (standby, other):
        each.kill(signal.SIGTERM)
        assert each.reap() == 0


def test_replica_has_bounded_memory_and_is_killed_first(installation: Installation, version: Version) -> None:
    """A replica's private memory may grow by weights, KV cache and a fixed amount. It is killed before the cache agent.
    A standby holds no tenant's data and has no limit yet."""
    standby = installation.fork()
    standby.report()
    assert int(Path(f"/proc/{standby.pid}/oom_score_adj").read_text()) >= 500
    assert resource.prlimit(standby.pid, resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    unbound_bytes = data_bytes(standby)
    standby.bind(version)
    bound_bytes, _ = resource.prlimit(standby.pid, resource.RLIMIT_DATA)
    growth_bytes = version.manifest.total_bytes + KV_BYTES + SPARE_BYTES
    assert unbound_bytes < bound_bytes < data_bytes(standby) + growth_bytes + (256 << 20)


def data_bytes(standby: Standby) -> int:
    """Return the bytes that count against the limit."""
    return int(standby.status()["VmData"].split()[0]) << 10


def test_sampled_answers_differ_between_runtimes(installation: Installation, version: Version) -> None:
    """Forks of one zygote draw different random numbers. A seed makes them equal."""
    first, second = _bound(installation, version), _bound(installation, version)
    hot = PROMPT | {"temperature": 2.0, "max_tokens": 60}
    assert _text(first.answer(hot)) != _text(second.answer(hot))
    assert _text(first.answer(hot | {"seed": 3})) == _text(second.answer(hot | {"seed": 3}))


def test_weights_are_shared_with_the_cache_and_not_copied(installation: Installation, version: Version) -> None:
    """The model's memory is the cache agent's slabs, mapped shared and read-only."""
    standby = _bound(installation, version)
    standby.answer(PROMPT)
    maps = Path(f"/proc/{standby.pid}/maps").read_text().splitlines()
    slabs = [line.split()[1] for line in maps if "memfd:" in line]
    assert slabs
    assert set(slabs) == {"r--s"}


def _slabs_of(standby: Standby) -> tuple[list[str], list[str]]:
    """Return the process's mappings and descriptors of the cache's memory."""
    maps = Path(f"/proc/{standby.pid}/maps").read_text().splitlines()
    return (
        [line for line in maps if "kelvin-slab" in line],
        [name for name in standby.fds().values() if "kelvin-slab" in name],
    )


def test_released_weights_return_from_any_tier(installation: Installation, version: Version) -> None:
    """Weights dropped at level 2 are evicted and damaged on disk. The wake heals them and gives the same tokens."""
    for each in list(installation.standbys):  # another process may hold a slab of this tenant
        each.end()
    standby = _bound(installation, version)
    right = _text(standby.answer(PROMPT))
    standby.sleep()
    assert _slabs_of(standby)[0], "asleep it keeps them"
    standby.drop()
    assert _slabs_of(standby) == ([], [])
    report = standby.report()
    assert (report.state, report.leases) == (RuntimeState.DEEP_SLEEP, 0)
    files = [installation.data / "cache" / TENANT / digest[:2] / digest for digest in version.digests]
    poll_until("chunks are on the disk", lambda: all(path.exists() for path in files) or None)
    poll_until("no process holds a slab", lambda: _evicted(installation))
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x40
    largest.write_bytes(content)
    bound = standby.wake(version)
    assert [span.stage for span in bound.spans] == [Stage.LEASED, Stage.BOUND, Stage.READY]
    assert bound.bytes_by_tier["host"] == 0
    assert bound.bytes_by_tier["nvme"] > 0
    assert bound.bytes_by_tier["store"] == len(content)
    assert _text(standby.answer(PROMPT, "r2")) == right
    mapped, opened = _slabs_of(standby)
    assert mapped
    assert not opened


def _evicted(installation: Installation) -> bool | None:
    """Return True once the host tier could be evicted; None while a slab is in use."""
    try:
        asyncio.run(evict(installation.directory, "host", None, None))
    except Refused:
        return None
    return True


def test_sigkill_leaves_a_meter_page_that_adds_up(installation: Installation, version: Version) -> None:
    """A runtime killed during an answer leaves its version, phases and requests to the supervisor."""
    standby = _bound(installation, version)

    async def cut() -> None:
        client = ServiceClient(installation.directory, f"rt-{standby.runtime_id}.sock", "the runtime")
        try:
            body = PROMPT | {"stream": True, "max_tokens": 200}
            async with standby.request(client, body, "r1") as answer:
                decoder = FrameDecoder()
                while not decoder.feed(await answer.content.readany()):
                    pass
                standby.kill(signal.SIGKILL)
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()
        finally:
            await client.close()

    asyncio.run(cut())
    meter = standby.meter()
    assert standby.reap() == -9
    assert (meter.tenant, meter.model, meter.version, meter.device_class) == ("acme", "m", version.id, "cpu-2")
    assert meter.requests == 1
    assert meter.phase in (Phase.ACTIVE, Phase.IDLE)
    assert all(spent > 0 for spent in meter.spent_ns[:2])
    assert meter.start_time_ns + sum(meter.spent_ns) == meter.since_ns


def test_sigterm_lets_an_answer_finish(installation: Installation, version: Version) -> None:
    """A drained runtime completes its answer and exits with 0."""
    standby = _bound(installation, version)

    async def drain() -> None:
        client = ServiceClient(installation.directory, f"rt-{standby.runtime_id}.sock", "the runtime")
        try:
            async with standby.request(client, PROMPT | {"stream": True, "max_tokens": 200}, "r1") as answer:
                decoder = FrameDecoder()
                frames = decoder.feed(await answer.content.readany())
                standby.kill(signal.SIGTERM)
                frames += decoder.feed(await answer.read())
                assert frames[-1].kind is FrameKind.END
        finally:
            await client.close()

    asyncio.run(drain())
    assert standby.reap() == 0


def test_a_disconnect_frees_everything(installation: Installation, version: Version) -> None:
    """After ten disconnects no block is held, no descriptor leaked, and the next request is served."""
    standby = _bound(installation, version)
    before = standby.report()

    async def leave() -> None:
        client = ServiceClient(installation.directory, f"rt-{standby.runtime_id}.sock", "the runtime")
        try:
            for number in range(10):
                async with standby.request(
                    client, PROMPT | {"stream": True, "max_tokens": 200}, f"r{number}"
                ) as answer:
                    await answer.content.readany()
                    answer.close()
        finally:
            await client.close()

    asyncio.run(leave())

    def idle() -> bool | None:
        report = standby.report()
        free = report.running == report.waiting == 0 and report.kv_blocks_free == report.kv_blocks_total
        return free or None

    poll_until("it is idle", idle)
    spool = installation.data / "spool" / standby.runtime_id
    poll_until("its orphans are durable", lambda: spool.exists() or None)
    shipping = 8  # the spool's segment, lock and directory, and a connection attempt to the control plane
    assert standby.report().open_files <= before.open_files + shipping
    assert standby.answer(PROMPT)[-1].kind is FrameKind.END


def test_a_child_may_compute_with_more_threads_than_its_parent(installation: Installation, version: Version) -> None:
    """A child can make its own thread pool, because its parent never had one."""
    standby = installation.fork()
    standby.bind(version, threads=2)
    assert standby.report().threads == 2
    assert standby.answer(PROMPT | {"prompt": list(range(4, 300))})[-1].kind is FrameKind.END


def test_missing_version_ends_the_standby(installation: Installation) -> None:
    """A bind of an unknown version fails by name and ends the standby, which a tenant has used."""
    standby = installation.fork()
    with pytest.raises(Refused) as caught:
        standby.bind(make_llama(seed=99))
    assert caught.value.failure.message.startswith("the manifest of version")
    assert standby.reap() == 1


def test_unsealed_weights_are_verified_before_serving(installation: Installation) -> None:
    """Without a seal for this fingerprint, known answers are recorded here and must repeat in the first batch."""
    plain = installation.publish(make_llama(seed=6))
    standby = _bound(installation, plain)
    assert standby.answer(PROMPT)[-1].kind is FrameKind.END
    assert "no attestation for this fingerprint" in (installation.data / "log").read_text()


@pytest.mark.deep
def test_runtimes_end_with_their_supervisor(tmp_path: Path) -> None:
    """When the supervisor's lifeline ends, zygote, standbys and runtimes end too."""
    with run_installation(tmp_path / "data", agent=False) as installation:
        standby = installation.fork()
        installation.cut_lifeline()
        assert standby.reap() in (0, 1)
        assert installation.zygote.wait(DEADLINE_S) == 0
