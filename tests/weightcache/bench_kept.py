"""Benchmark of restores from packs and from a kept file: `python -m tests.weightcache.bench_kept [MiB] [ROUNDS]`.

A real agent and real client processes restore the same bytes of two tenants in turn. Asserts nothing about speed.
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from blake3 import blake3

from coldstart_bench.harness.machine_state import drop_page_cache, warm_page_cache
from kelvin.blobstore.file_store import FileStore
from kelvin.blobstore.packs import FileChunk, FileIndex, FileSpan, encode_file_index, file_pack
from kelvin.contracts.artifacts.manifest import CHUNK_BYTES
from kelvin.ipc.socket_directory import SocketDirectory
from snapshotter.intake.policy.layout import assemble, lay_out
from snapshotter.intake.policy.tensors_index import parse_index
from tests.snapshotter.models import Weight, weight
from tests.snapshotter.tensors_files import TensorsFile
from tests.weightcache.bench import agent, drop, put_packs
from tests.weightcache.kit import Version, attest, make_version_of, wait_for

MATRIX_BYTES = 12 << 20
NORM = 2048  # float32 values
INDEX_BYTES = 256 << 10
PACKED, KEPT = "packed", "kept"

CLIENT = """
import sys, time
from pathlib import Path
from kelvin.ipc.socket_directory import SocketDirectory
from weightcache.client.lease import acquire

directory = SocketDirectory(Path(sys.argv[1]))
begin = time.perf_counter()
lease = acquire(directory, sys.argv[2], sys.argv[3], 300.0)
print(time.perf_counter() - begin, *(f"{tier}={count}" for tier, count in lease.chunks_by_tier.items() if count))
"""


def tensors_of(mib: int) -> dict[str, Weight]:
    """Return matrices, with a norm before every second one."""
    found: dict[str, Weight] = {}
    for number in range((mib << 20) // MATRIX_BYTES):
        if number % 2 == 0:
            found[f"layers.{number}.norm"] = weight((NORM,), number)
        found[f"layers.{number}.weight"] = weight((MATRIX_BYTES,), 1000 + number, "U8")
    return found


async def publish(data: Path, tensors: dict[str, Weight]) -> Version:
    """Publish the version in packs for one tenant and in a kept file for the other."""
    raw = TensorsFile(tensors, index_bytes=INDEX_BYTES).build()
    entries = parse_index("m.tensors", raw[: 73 + INDEX_BYTES], len(raw))
    layout = lay_out([], [entry.tensor for entry in entries], list(tensors), CHUNK_BYTES)
    version = make_version_of([assemble(chunk, {"m.tensors": raw}) for chunk in layout.chunks], CHUNK_BYTES)
    store = FileStore(data / "store")
    await put_packs(store, version, PACKED)
    pack = file_pack(blake3(raw).hexdigest())
    chunks = (
        FileChunk(digest, tuple(FileSpan(piece.offset, piece.length) for piece in chunk.pieces))
        for digest, chunk in zip(version.digests, layout.chunks, strict=True)
    )
    await store.put_if_absent(f"{KEPT}/packs/{pack}", raw)
    await store.put_if_absent(f"{KEPT}/index/{pack}", encode_file_index(FileIndex(tuple(chunks), len(raw))))
    await store.put_if_absent(f"{KEPT}/manifests/{version.id}", version.raw)
    for tenant in (PACKED, KEPT):
        await attest(store, version.id, tenant)
    return version


def leased_s(data: Path, tenant: str, version: str) -> float:
    """Return the seconds until a fresh process has the lease."""
    command = [sys.executable, "-c", CLIENT, str(data / "run"), tenant, version]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(output.split()[0])


def main() -> None:
    arguments = [int(word) for word in sys.argv[1:3]]
    mib, rounds = arguments if len(arguments) == 2 else (512, 9)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as root:
        data = Path(root)
        directory = SocketDirectory(data / "run")
        version = asyncio.run(publish(data, tensors_of(mib)))
        count = len(set(version.digests))
        packs = {tenant: list((data / "store" / tenant / "packs").iterdir()) for tenant in (PACKED, KEPT)}
        with agent(data, directory):
            for turn in range(rounds):
                for tenant in (PACKED, KEPT) if turn % 2 else (KEPT, PACKED):
                    for tier in ("store, cold", "store, warm", "nvme"):
                        drop(directory, "host", *(() if tier == "nvme" else ("nvme",)))
                        (drop_page_cache if tier == "store, cold" else warm_page_cache)(packs[tenant])
                        found[tier, tenant].append(leased_s(data, tenant, version.id))
                        asyncio.run(wait_for(directory, "admitted", lambda state: state.nvme.chunks >= count))
                    drop(directory, "host", "nvme")
        directory.close()
    for tier in ("store, cold", "store, warm", "nvme"):
        packed, kept = (statistics.median(found[tier, tenant]) for tenant in (PACKED, KEPT))
        ratios = [two / one for one, two in zip(found[tier, PACKED], found[tier, KEPT], strict=True)]
        print(f"{tier}: packed {packed:.3f} s, kept {kept:.3f} s, ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
