"""Benchmark of the cache: `python -m tests.weightcache.bench [MiB]`. Prints; asserts nothing about speed.

It runs a real agent and real client processes over a directory on the disk to be measured. Beside each verified restore
it reads the same files without a check, because absolute figures of a shared machine mean little. It uses plain
O_DIRECT with a cold page cache, and mapped files with a hot one.
"""

import asyncio
import mmap
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from kelvin.blobstore.file_store import FileStore
from kelvin.contracts.artifacts.manifest import CHUNK_BYTES
from kelvin.ipc.socket_directory import SocketDirectory
from tests.weightcache.disks import forget
from tests.weightcache.kit import TENANT, Version, attest, evict, make_version_of, put_pack, read_state, wait_for
from weightcache.client import libc
from weightcache.client.lease import acquire
from weightcache.host.slab_pool import Slab
from weightcache.nvme.chunk_files import open_direct
from weightcache.sources.source import is_digest_of
from weightcache.sources.verifier import Tags

TENSOR_BYTES = 20 << 20
PACK_CHUNKS = 30
ROUNDS = 5

CLIENT = """
import sys, time
from pathlib import Path
from kelvin.ipc.socket_directory import SocketDirectory
from weightcache.client.lease import acquire

directory = SocketDirectory(Path(sys.argv[1]))
begin = time.perf_counter()
lease = acquire(directory, "acme", sys.argv[2], 300.0)
leased = time.perf_counter()
bytes(lease.view(0, lease.total_bytes)[:: 1 << 21])
print(leased - begin, time.perf_counter() - leased, lease.total_bytes, len(lease.extents), lease.chunks_by_tier)
"""


def version_of(mib: int) -> Version:
    source = random.Random(1)
    left, chunks = mib << 20, list[bytes]()
    while left:
        tensor = min(left, TENSOR_BYTES)
        left -= tensor
        chunks += [source.randbytes(min(CHUNK_BYTES, tensor - at)) for at in range(0, tensor, CHUNK_BYTES)]
    return make_version_of(chunks, CHUNK_BYTES)


async def put_packs(store: FileStore, version: Version, tenant: str = TENANT) -> None:
    """Put the version's chunks, `PACK_CHUNKS` to a pack, then its manifest."""
    for first in range(0, len(version.chunks), PACK_CHUNKS):
        await put_pack(store, version.chunks[first : first + PACK_CHUNKS], tenant)
    await store.put_if_absent(f"{tenant}/manifests/{version.id}", version.raw)


async def publish(data: Path, version: Version) -> None:
    store = FileStore(data / "store")
    await put_packs(store, version)
    await attest(store, version.id)


@contextmanager
def agent(data: Path, directory: SocketDirectory, *words: str, spare: int = 1) -> Iterator[None]:
    """Run `python -m weightcache`, or python with these arguments, until the block ends. Waits for free slabs first."""
    environment = {"KELVIN_LOG_LEVEL": "error", **os.environ, "KELVIN_DATA": str(data)}
    process = subprocess.Popen([sys.executable, *(words or ("-m", "weightcache"))], env=environment)
    try:
        while not (data / "run" / "cache.sock").exists():
            time.sleep(0.01)
        asyncio.run(wait_for(directory, "spare slabs", lambda state: state.host.slabs_free >= spare))
        yield
    finally:
        process.terminate()
        process.wait()
        (data / "run" / "cache.sock").unlink()


def leased(data: Path, version: str) -> tuple[float, float, int, str]:
    """Return seconds to lease, seconds to touch each huge page, bytes, and the rest of the client's output."""
    command = [sys.executable, "-c", CLIENT, str(data / "run"), version]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    lease_s, touch_s, size, rest = re.split(" ", output, maxsplit=3)
    return float(lease_s), float(touch_s), int(size), rest


def chunk_files(data: Path) -> list[Path]:
    return sorted((data / "cache").glob("[!.]*/??/*"))


def make_hot(data: Path) -> None:
    for path in chunk_files(data):
        path.read_bytes()


def make_cold(data: Path) -> None:
    for path in chunk_files(data):
        forget(path)


def mapped_rate(data: Path) -> float:
    """Return the GB/s of mapping the chunk files and touching each page."""
    total, begin = 0, time.perf_counter()
    for path in chunk_files(data):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            with memoryview(mapped) as view:
                view[:: mmap.PAGESIZE].tobytes()
            total += len(mapped)
    return total / (time.perf_counter() - begin) / 1e9


def direct_rate(data: Path, threads: int) -> float:
    """Return the GB/s of plain O_DIRECT reads of the chunk files into huge pages."""
    paths = iter(chunk_files(data))
    slab = Slab(threads * CHUNK_BYTES)

    def read(thread: int) -> int:
        into, total = libc.view(slab.address + thread * CHUNK_BYTES, CHUNK_BYTES), 0
        while (path := next(paths, None)) is not None:
            fd = open_direct(path, os.O_RDONLY)
            total += os.preadv(fd, [into[: os.fstat(fd).st_size]], 0)
            os.close(fd)
        return total

    with ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        total = sum(pool.map(read, range(threads)))
        rate = total / (time.perf_counter() - begin) / 1e9
    slab.close()
    return rate


def drop(directory: SocketDirectory, *tiers: str) -> None:
    asyncio.run(wait_for(directory, "no process holds a slab", lambda state: state.holders == 0))
    for tier in tiers:
        asyncio.run(evict(directory, tier, None, None))


def rate_of(check: Callable[[], object], nbytes: int) -> float:
    """Return the GB/s of one core, the best of 50 runs. The bytes stay in the core's cache."""
    samples = []
    for _ in range(50):
        begin = time.perf_counter()
        check()
        samples.append(time.perf_counter() - begin)
    return nbytes / min(samples) / 1e9


def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    version = version_of(mib)
    chunk, tags = memoryview(bytes(CHUNK_BYTES)), Tags()
    digest = rate_of(lambda: is_digest_of(chunk, ""), CHUNK_BYTES)
    tag = rate_of(lambda: tags.compute_tag(chunk, "0" * 64), CHUNK_BYTES)
    print(f"one core, a chunk: digest {digest:.1f} GB/s, tag {tag:.1f} GB/s")
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as root:
        data = Path(root)
        directory = SocketDirectory(data / "run")
        asyncio.run(publish(data, version))
        with agent(data, directory):
            print("store, fresh slabs:   ", leased(data, version.id))
            drop(directory, "host", "nvme")
            print("store, slabs made:    ", leased(data, version.id))
            asyncio.run(wait_for(directory, "admitted", lambda state: state.nvme.chunks == len(set(version.digests))))
            print("host, a new process:  ", leased(data, version.id))
            samples = []
            for _ in range(200):
                begin = time.perf_counter()
                acquire(directory, TENANT, version.id, 10.0).close()
                samples.append(time.perf_counter() - begin)
            p50, p99 = statistics.median(samples), statistics.quantiles(samples, n=100)[98]
            print(f"host, acquire and unmap: p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms")
        with agent(data, directory):
            print("NVMe, fresh slabs:    ", leased(data, version.id))
            cold, hot = list[float](), list[float]()
            for _ in range(ROUNDS):
                drop(directory, "host")
                make_cold(data)
                lease_s, _, size, _ = leased(data, version.id)
                verified, plain = size / lease_s / 1e9, max(direct_rate(data, threads) for threads in (1, 2, 4))
                cold.append(verified / plain)
                print(f"NVMe, cold: verified {verified:.2f} GB/s, plain O_DIRECT {plain:.2f}, ratio {cold[-1]:.2f}")
                drop(directory, "host")
                make_hot(data)
                lease_s, _, size, _ = leased(data, version.id)
                verified, plain = size / lease_s / 1e9, mapped_rate(data)
                hot.append(verified / plain)
                print(f"NVMe, hot: verified {verified:.2f} GB/s, mapped {plain:.2f}, ratio {hot[-1]:.2f}")
            print(f"median ratios: cold {statistics.median(cold):.2f}, hot {statistics.median(hot):.2f}")
            print("bytes by way:", asyncio.run(read_state(directory)).nvme.bytes_by_way)
        directory.close()


if __name__ == "__main__":
    main()
