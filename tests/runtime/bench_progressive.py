"""`python -m tests.runtime.bench_progressive [ROUNDS] [WORD]`: what it saves to lend a version while it is filled.

Half a gigabyte from a cold disk and from a throttled store, progressive and whole in turns. Measured are a restore
until the engine could begin, and a copy through a ring of buffers, as to a device. The copy goes into this process's
memory, without checksums, which would take a CPU longer than all the rest. WORD selects cases by name. Prints only.
"""

import asyncio
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kelvin.blobstore.file_store import FileStore
from kelvin.contracts.artifacts.object_keys import attestation_key
from kelvin.contracts.artifacts.runtime_control import BindRequest, SealJob
from kelvin.contracts.wire import encode
from kelvin.ipc.socket_directory import SocketDirectory
from runtime.app.replica_operations import build_operations
from runtime.lifecycle.sealing_jobs import seal
from runtime.surface.served_version import EngineCallbacks
from tests.runtime.versions import MemoryLease, make_llama
from tests.weightcache.bench import agent, drop, put_packs
from tests.weightcache.bench import make_cold as make_cold_files
from tests.weightcache.kit import TENANT, Version, read_state, wait_for
from weightcache.client import lease as client
from weightcache.client.device_checksum import block_count
from weightcache.client.device_copy import SLOT_BYTES, SLOTS, copy_through_lane

RATES = (2e9, 0.5e9)
SPARE = 3  # slabs
# The agent with a store that is limited to this many bytes a second.
THROTTLED = """
import sys, threading, time
from kelvin.blobstore import file_store as files
from weightcache.__main__ import main

rate, lock, free_at = float(sys.argv[1]), threading.Lock(), 0.0
read = files._read_into

def throttled(key, path, offset, into):
    global free_at
    read(key, path, offset, into)
    with lock:
        free_at = max(free_at, time.monotonic()) + into.nbytes / rate
        wait_s = free_at - time.monotonic()
    time.sleep(max(0.0, wait_s))

if rate:
    files._read_into = throttled
main()
"""


class MemoryLane:
    """A fake device in this process's memory. Copies run in order in a thread."""

    slots = SLOTS
    slot_bytes = SLOT_BYTES

    def __init__(self) -> None:
        self._buffers = [torch.ones(SLOT_BYTES, dtype=torch.uint8) for _ in range(SLOTS)]
        self._thread = ThreadPoolExecutor(1)
        self._arena = torch.ones(1 << 30, dtype=torch.uint8)
        self._last: dict[int, Future[Any]] = {}

    def begin(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._arena[:nbytes], torch.zeros((block_count(nbytes), 2), dtype=torch.int64)

    def wait(self, slot: int) -> None:
        if slot in self._last:
            self._last[slot].result()

    def stage(self, slot: int, address: int, nbytes: int) -> None:
        ctypes.memmove(self._buffers[slot].data_ptr(), address, nbytes)

    def send(self, slot: int, nbytes: int, into: torch.Tensor, sums: torch.Tensor) -> None:
        self._last[slot] = self._thread.submit(into.copy_, self._buffers[slot][:nbytes])

    def finish(self) -> None:
        for slot in self._last:
            self.wait(slot)


def throttled(data: Path, directory: SocketDirectory, rate: float) -> AbstractContextManager[None]:
    """Run an agent whose store gives this many bytes a second; unlimited if 0."""
    return agent(data, directory, "-c", THROTTLED, str(rate), spare=SPARE)


def drop_all(directory: SocketDirectory, *tiers: str) -> None:
    drop(directory, *tiers)
    asyncio.run(wait_for(directory, "spare slabs", lambda state: state.host.slabs_free >= SPARE))


def in_child(work: Callable[[], float]) -> float:
    """Return the result of `work` in a fork, in seconds. A standby is a fork too."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as answer:
        return float(answer.read())


def restored(directory: SocketDirectory, version: Version, *, progressive: bool) -> float:
    torch.set_num_threads(1)
    acquire = client.acquire
    client.acquire = lambda *args, **kwargs: acquire(*args, **{**kwargs, "progressive": progressive})
    bind = BindRequest(tenant=TENANT, model="m", version=version.id, device_class="cpu-1", threads=1, kv_bytes=64 << 20)
    begin = time.perf_counter()
    build_operations(directory, 300.0).restore(bind, EngineCallbacks(lambda _: None, lambda _: None))
    return time.perf_counter() - begin


def copied(directory: SocketDirectory, version: Version, *, progressive: bool) -> float:
    lane = MemoryLane()
    begin = time.perf_counter()
    lease = client.acquire(directory, TENANT, version.id, 300.0, progressive=progressive)
    copy_through_lane(lane, lease.address, lease.total_bytes, lease.ready_parts())
    return time.perf_counter() - begin


async def publish(data: Path, version: Version) -> None:
    store = FileStore(data / "store")
    await put_packs(store, version)
    found = seal(SealJob(tenant=TENANT, version=version.id), MemoryLease(version).acquire)
    assert found.fast_bind
    await store.put_if_absent(attestation_key(TENANT, version.id, found.fingerprint), encode(found))


def make_cold(data: Path, directory: SocketDirectory) -> None:
    drop_all(directory, "host")
    make_cold_files(data)


def compare(name: str, rounds: int, prepare: Callable[[], None], measure: Callable[..., float]) -> None:
    """Measure both in turns. Print the medians, and the quartiles of ratios of neighbours."""
    if len(sys.argv) > 2 and sys.argv[2] not in name:
        return
    whole, early = list[float](), list[float]()
    for number in range(rounds):
        for progressive in (False, True) if number % 2 else (True, False):
            prepare()
            (early if progressive else whole).append(in_child(partial(measure, progressive=progressive)))
    low, ratio, high = statistics.quantiles(one / other for one, other in zip(early, whole, strict=True))
    medians = statistics.median(whole) * 1e3, statistics.median(early) * 1e3
    print(f"{name}: whole {medians[0]:.0f} ms, progressive {medians[1]:.0f} ms, ", end="")
    print(f"ratio {ratio:.2f} ({low:.2f} to {high:.2f})", flush=True)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    version = make_llama(
        seed=1,
        dtype="bfloat16",
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=512,
    )
    print(f"{version.manifest.total_bytes / 1e6:.0f} MB, {len(version.manifest.tensors)} tensors")
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as root:
        data = Path(root)
        directory = SocketDirectory(data / "run")
        asyncio.run(publish(data, version))
        ways = {"restore": partial(restored, directory, version), "copy": partial(copied, directory, version)}
        with throttled(data, directory, 0.0):
            in_child(partial(restored, directory, version, progressive=False))
            count = len(set(version.digests))
            asyncio.run(wait_for(directory, "on the disk", lambda state: state.nvme.chunks == count))
            for name, way in ways.items():
                in_child(partial(way, progressive=False))
                compare(f"{name}, in memory", rounds, lambda: None, way)
                compare(f"{name}, cold NVMe", rounds, partial(make_cold, data, directory), way)
            print("by way:", asyncio.run(read_state(directory)).nvme.bytes_by_way)
        for rate in RATES:
            with throttled(data, directory, rate):
                for name, way in ways.items():
                    compare(
                        f"{name}, store of {rate / 1e9:g} GB/s",
                        rounds,
                        lambda: drop_all(directory, "nvme", "host"),
                        way,
                    )
        directory.close()
    print("load:", os.getloadavg())


if __name__ == "__main__":
    main()
