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
from tests.runtime.processes import DEADLINE_S, KV_BYTES, Born, Installation, installation, poll_until
from tests.runtime.versions import make_llama
from tests.weightcache.kit import TENANT, Version, evict

PROMPT = {"prompt": [0, 7, 9, 11], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def version(house: Installation) -> Version:
    """A sealed version. Its seal ran on a standby, which ended with it."""
    version = house.publish(make_llama(seed=5))
    standby = house.fork()
    attestation = standby.seal(version)
    assert attestation.fast_bind
    assert standby.reap() == 0
    return version


def _bound(house: Installation, version: Version) -> Born:
    born = house.fork()
    born.bind(version)
    return born


def _text(frames: list[Frame]) -> str:
    data = b"".join(frame.payload for frame in frames if frame.kind is FrameKind.DATA)
    return str(json.loads(data)["choices"][0]["text"])


def test_a_standby_becomes_a_runtime_and_answers(house: Installation, version: Version) -> None:
    """A standby binds from the cache's memory with stages in order, and each runtime gives the same answer."""
    born = house.fork()
    bound = born.bind(version)
    assert [span.stage for span in bound.spans] == [Stage.LEASED, Stage.BOUND, Stage.READY]
    report = born.report()
    assert (report.state, report.leases, report.version) == (RuntimeState.READY, 1, version.id)
    frames = born.answer(PROMPT)
    assert frames[-1].kind is FrameKind.END
    assert frames[-1].counts.completion_tokens == 12
    assert _text(born.answer(PROMPT, "r2")) == _text(frames)
    other = _bound(house, version)
    assert _text(other.answer(PROMPT)) == _text(frames)
    for each in (born, other):
        each.kill(signal.SIGTERM)
        assert each.reap() == 0


def test_replica_has_bounded_memory_and_is_killed_first(house: Installation, version: Version) -> None:
    """A replica's private memory may grow by weights, KV cache and a fixed amount. It is killed before the cache agent.
    A standby holds no tenant's data and has no limit yet."""
    born = house.fork()
    born.report()
    assert int(Path(f"/proc/{born.pid}/oom_score_adj").read_text()) >= 500
    assert resource.prlimit(born.pid, resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    unbound_bytes = data_bytes(born)
    born.bind(version)
    bound_bytes, _ = resource.prlimit(born.pid, resource.RLIMIT_DATA)
    growth_bytes = version.manifest.total_bytes + KV_BYTES + SPARE_BYTES
    assert unbound_bytes < bound_bytes < data_bytes(born) + growth_bytes + (256 << 20)


def data_bytes(born: Born) -> int:
    """Return the bytes that count against the limit."""
    return int(born.status()["VmData"].split()[0]) << 10


def test_sampled_answers_differ_between_runtimes(house: Installation, version: Version) -> None:
    """Forks of one zygote draw different random numbers. A seed makes them equal."""
    first, second = _bound(house, version), _bound(house, version)
    hot = PROMPT | {"temperature": 2.0, "max_tokens": 60}
    assert _text(first.answer(hot)) != _text(second.answer(hot))
    assert _text(first.answer(hot | {"seed": 3})) == _text(second.answer(hot | {"seed": 3}))


def test_weights_are_shared_with_the_cache_and_not_copied(house: Installation, version: Version) -> None:
    """The model's memory is the cache agent's slabs, mapped shared and read-only."""
    born = _bound(house, version)
    born.answer(PROMPT)
    maps = Path(f"/proc/{born.pid}/maps").read_text().splitlines()
    slabs = [line.split()[1] for line in maps if "memfd:" in line]
    assert slabs
    assert set(slabs) == {"r--s"}


def _slabs_of(born: Born) -> tuple[list[str], list[str]]:
    """Return the process's mappings and descriptors of the cache's memory."""
    maps = Path(f"/proc/{born.pid}/maps").read_text().splitlines()
    return (
        [line for line in maps if "kelvin-slab" in line],
        [name for name in born.fds().values() if "kelvin-slab" in name],
    )


def test_dropped_weights_come_back_from_wherever_they_are(house: Installation, version: Version) -> None:
    """Weights dropped at level 2 are evicted and damaged on disk. The wake heals them and gives the same tokens."""
    for each in list(house.born):  # another process may hold a slab of this tenant
        each.end()
    born = _bound(house, version)
    right = _text(born.answer(PROMPT))
    born.sleep()
    assert _slabs_of(born)[0], "asleep it keeps them"
    born.drop()
    assert _slabs_of(born) == ([], [])
    report = born.report()
    assert (report.state, report.leases) == (RuntimeState.DEEP_SLEEP, 0)
    files = [house.data / "cache" / TENANT / digest[:2] / digest for digest in version.digests]
    poll_until("chunks are on the disk", lambda: all(path.exists() for path in files) or None)
    poll_until("no process holds a slab", lambda: _evicted(house))
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x40
    largest.write_bytes(content)
    bound = born.wake(version)
    assert [span.stage for span in bound.spans] == [Stage.LEASED, Stage.BOUND, Stage.READY]
    assert bound.bytes_by_tier["host"] == 0
    assert bound.bytes_by_tier["nvme"] > 0
    assert bound.bytes_by_tier["store"] == len(content)
    assert _text(born.answer(PROMPT, "r2")) == right
    mapped, opened = _slabs_of(born)
    assert mapped
    assert not opened


def _evicted(house: Installation) -> bool | None:
    """Return True once the host tier could be evicted; None while a slab is in use."""
    try:
        asyncio.run(evict(house.directory, "host", None, None))
    except Refused:
        return None
    return True


def test_sigkill_leaves_a_meter_page_that_adds_up(house: Installation, version: Version) -> None:
    """A runtime killed during an answer leaves its version, phases and requests to the supervisor."""
    born = _bound(house, version)

    async def cut() -> None:
        client = ServiceClient(house.directory, f"rt-{born.runtime_id}.sock", "the runtime")
        try:
            body = PROMPT | {"stream": True, "max_tokens": 200}
            async with born.request(client, body, "r1") as answer:
                decoder = FrameDecoder()
                while not decoder.feed(await answer.content.readany()):
                    pass
                born.kill(signal.SIGKILL)
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()
        finally:
            await client.close()

    asyncio.run(cut())
    meter = born.meter()
    assert born.reap() == -9
    assert (meter.tenant, meter.model, meter.version, meter.device_class) == ("acme", "m", version.id, "cpu-2")
    assert meter.requests == 1
    assert meter.phase in (Phase.ACTIVE, Phase.IDLE)
    assert all(spent > 0 for spent in meter.spent_ns[:2])
    assert meter.start_time_ns + sum(meter.spent_ns) == meter.since_ns


def test_sigterm_lets_an_answer_finish(house: Installation, version: Version) -> None:
    """A drained runtime completes its answer and exits with 0."""
    born = _bound(house, version)

    async def drain() -> None:
        client = ServiceClient(house.directory, f"rt-{born.runtime_id}.sock", "the runtime")
        try:
            async with born.request(client, PROMPT | {"stream": True, "max_tokens": 200}, "r1") as answer:
                decoder = FrameDecoder()
                frames = decoder.feed(await answer.content.readany())
                born.kill(signal.SIGTERM)
                frames += decoder.feed(await answer.read())
                assert frames[-1].kind is FrameKind.END
        finally:
            await client.close()

    asyncio.run(drain())
    assert born.reap() == 0


def test_a_disconnect_frees_everything(house: Installation, version: Version) -> None:
    """After ten disconnects no block is held, no descriptor leaked, and the next request is served."""
    born = _bound(house, version)
    before = born.report()

    async def leave() -> None:
        client = ServiceClient(house.directory, f"rt-{born.runtime_id}.sock", "the runtime")
        try:
            for number in range(10):
                async with born.request(client, PROMPT | {"stream": True, "max_tokens": 200}, f"r{number}") as answer:
                    await answer.content.readany()
                    answer.close()
        finally:
            await client.close()

    asyncio.run(leave())

    def idle() -> bool | None:
        report = born.report()
        free = report.running == report.waiting == 0 and report.kv_blocks_free == report.kv_blocks_total
        return free or None

    poll_until("it is idle", idle)
    spool = house.data / "spool" / born.runtime_id
    poll_until("its orphans are durable", lambda: spool.exists() or None)
    shipping = 8  # the spool's segment, lock and directory, and a connection attempt to the control plane
    assert born.report().open_files <= before.open_files + shipping
    assert born.answer(PROMPT)[-1].kind is FrameKind.END


def test_a_child_may_compute_with_more_threads_than_its_parent(house: Installation, version: Version) -> None:
    """A child can make its own thread pool, because its parent never had one."""
    born = house.fork()
    born.bind(version, threads=2)
    assert born.report().threads == 2
    assert born.answer(PROMPT | {"prompt": list(range(4, 300))})[-1].kind is FrameKind.END


def test_a_version_that_is_not_there_ends_the_standby(house: Installation) -> None:
    """A bind of an unknown version fails by name and ends the standby, which a tenant has used."""
    born = house.fork()
    with pytest.raises(Refused) as caught:
        born.bind(make_llama(seed=99))
    assert caught.value.failure.message.startswith("the manifest of version")
    assert born.reap() == 1


def test_unsealed_weights_are_proven_before_they_serve(house: Installation) -> None:
    """Without a seal for this fingerprint, known answers are recorded here and must repeat in the first batch."""
    plain = house.publish(make_llama(seed=6))
    born = _bound(house, plain)
    assert born.answer(PROMPT)[-1].kind is FrameKind.END
    assert "no attestation for this fingerprint" in (house.data / "log").read_text()


@pytest.mark.deep
def test_a_supervisor_that_is_gone_takes_its_runtimes_along(tmp_path: Path) -> None:
    """When the supervisor's lifeline ends, zygote, standbys and runtimes end too."""
    with installation(tmp_path / "data", agent=False) as house:
        born = house.fork()
        house.cut_lifeline()
        assert born.reap() in (0, 1)
        assert house.zygote.wait(DEADLINE_S) == 0
