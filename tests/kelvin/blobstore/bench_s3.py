"""Benchmark reads of chunks from an S3 endpoint with `S3Store` and with the CRT client: GB/s and CPU seconds per GB.

`python -m tests.kelvin.blobstore.bench_s3 'http://127.0.0.1:9000' BUCKET KEY MIB`: any server of ranges will do, such
as nginx over a directory with a file BUCKET/KEY of at least MIB. Requests are signed with the usual credential chain;
the server need not check signatures. Rows alternate, so that other load disturbs all of them alike. `awscrt` and
`s3transfer` are measured if they are installed.
"""

import asyncio
import io
import mmap
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from kelvin.blobstore.s3_client import make_client
from kelvin.blobstore.s3_location import S3Location
from kelvin.blobstore.s3_store import S3Store

CHUNK: Final = 8 << 20
ROUNDS: Final = 5


class Bench:
    """One object that is read into the same memory again and again."""

    def __init__(self, endpoint: str, bucket: str, key: str, mib: int) -> None:
        self.place = S3Location(bucket, endpoint=endpoint, region="us-east-1", path_style=True)
        self.key = key
        self.memory = mmap.mmap(-1, mib << 20)
        self.memory.write(bytes(mib << 20))  # touch the pages now, so that page faults are not measured
        self.view = memoryview(self.memory)
        self.store = S3Store(self.place, make_client(self.place))

    async def by_store(self, at_once: int) -> None:
        """Read as the cache does: in chunks, `at_once` of them in parallel."""
        free = asyncio.Semaphore(at_once)

        async def chunk(offset: int) -> None:
            async with free:
                await self.store.read_into(self.key, offset, self.view[offset : offset + CHUNK])

        await asyncio.gather(*(chunk(offset) for offset in range(0, len(self.view), CHUNK)))

    def crt_client(self) -> Any:
        """Return a CRT client with parts of one chunk and a throughput target above what this machine reaches."""
        from awscrt import auth, s3
        from awscrt import io as crt_io

        loops = crt_io.EventLoopGroup(2)
        bootstrap = crt_io.ClientBootstrap(loops, crt_io.DefaultHostResolver(loops))
        provider = auth.AwsCredentialsProvider.new_default_chain(bootstrap)
        signing = s3.create_default_s3_signing_config(region="us-east-1", credential_provider=provider)
        return s3.S3Client(
            bootstrap=bootstrap,
            region="us-east-1",
            signing_config=signing,
            tls_mode=s3.S3RequestTlsMode.DISABLED,
            part_size=CHUNK,
            throughput_target_gbps=25.0,
        )

    def by_transfer(self, client: Any) -> Callable[[], Awaitable[None]]:
        """Return a run of boto3's CRT transfer client, which writes the whole object to a file-like object."""
        import botocore.session
        from botocore.config import Config
        from s3transfer.crt import BotocoreCRTRequestSerializer, CRTTransferManager

        config = Config(s3={"addressing_style": "path"})
        arguments = {"region_name": "us-east-1", "endpoint_url": self.place.endpoint, "config": config}
        session = botocore.session.get_session()
        transfers = CRTTransferManager(client, BotocoreCRTRequestSerializer(session, arguments))

        async def run() -> None:
            sink = _Sink(self.view)
            await asyncio.to_thread(transfers.download(self.place.bucket, self.key, sink).result)
            assert sink.at == len(self.view)

        return run

    def by_crt(self, client: Any, at_once: int) -> Callable[[], Awaitable[None]]:
        """Return a run of the lower-level CRT client, which reads ranges."""
        from awscrt.http import HttpHeaders, HttpRequest
        from awscrt.s3 import S3RequestType

        host = str(self.place.endpoint).removeprefix("http://")

        def begin(offset: int) -> Any:
            headers = HttpHeaders([("host", host), ("range", f"bytes={offset}-{offset + CHUNK - 1}")])

            def take(chunk: bytes, offset: int, **rest: object) -> None:
                self.view[offset : offset + len(chunk)] = chunk

            request = HttpRequest("GET", f"/{self.place.bucket}/{self.key}", headers)
            return client.make_request(type=S3RequestType.GET_OBJECT, request=request, on_body=take).finished_future

        async def run() -> None:
            free = asyncio.Semaphore(at_once)

            async def chunk(offset: int) -> None:
                async with free:
                    await asyncio.wrap_future(begin(offset))

            await asyncio.gather(*(chunk(offset) for offset in range(0, len(self.view), CHUNK)))

        return run


class _Sink(io.RawIOBase):
    """A file that writes each piece into memory after the previous one."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.at = 0

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self._view[self.at : self.at + len(piece)] = piece
        self.at += len(piece)
        return len(piece)


async def measure(bench: Bench) -> None:
    """Print the median and the best of each row."""
    rows: dict[str, Callable[[], Awaitable[None]]] = {
        "the store, 6 chunks at once": lambda: bench.by_store(6),
        "the store, 16 chunks at once": lambda: bench.by_store(16),
    }
    with suppress(ModuleNotFoundError):
        client = bench.crt_client()
        rows["CRT transfer client, whole object"] = bench.by_transfer(client)
        rows["CRT client, 6 ranges at once"] = bench.by_crt(client, 6)
        rows["CRT client, 16 ranges at once"] = bench.by_crt(client, 16)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    size = len(bench.view) / 1e9
    for number in range(ROUNDS + 1):
        for name, run in rows.items():
            began, cpu = time.perf_counter(), time.process_time()
            await run()
            if number:  # the first round opens connections and isn't counted
                found[name].append((size / (time.perf_counter() - began), (time.process_time() - cpu) / size))
    for name, rates in found.items():
        median = statistics.median(rate for rate, _ in rates)
        cost = statistics.median(cost for _, cost in rates)
        print(f"{name:36} {median:5.2f} GB/s (best {max(rates)[0]:.2f}), {cost:.2f} cpu-s/GB")
    await bench.store.close()


if __name__ == "__main__":
    _endpoint, _bucket, _key, _mib = sys.argv[1:]
    asyncio.run(measure(Bench(_endpoint, _bucket, _key, int(_mib))))
