"""Measure the cost of scanning: `python -m tests.kelvin.filters.measure`. No test, as it depends on the load."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from kelvin.contracts.artifacts.filter_api import ENTITIES, FILTERS_SOCKET, FilterRequest, FilterRule
from kelvin.filters.pii import scan_text
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from runtime.surface.filter_pipeline import FilterClient

TEXTS = {
    "prose": "The quick brown fox jumps over the lazy dog, and nobody has seen 12 apples. " * 1300,
    "addresses and numbers": "jo@example.org 4111 1111 1111 1111 +49 30 901820 " * 2000,
    "digits": "1 2 3 4 5 6 7 8 9 0 " * 5000,
    "capitals with digits": "AB12 " * 20_000,
}
QUESTIONS = 500
STREAMS = 32
WAIT_S = 30.0


def rules(*regions: str) -> tuple[FilterRule, ...]:
    """Return a rule that redacts all entities."""
    return (FilterRule(filter="pii", actions=dict.fromkeys(ENTITIES, "redact"), phone_regions=regions),)


def measure_looking() -> None:
    """Print characters per second, scanned in this process."""
    for name, text in TEXTS.items():
        for regions in ((), ("US",)):
            began = time.perf_counter()
            scan_text(text, rules(*regions), whole=True)
            rate = len(text) / (time.perf_counter() - began)
            print(f"{name}, regions {', '.join(regions) or 'none'}: {rate / 1e6:.2f} million characters/s")


async def measure_asking(data: Path) -> None:
    """Print the time of single requests, then the rate of many concurrent streams, over the socket."""
    directory = SocketDirectory(data / "run")
    client = ServiceClient(directory, FILTERS_SOCKET, "the filters")
    try:
        filters = FilterClient(client, asyncio.get_running_loop())
        question = FilterRequest(direction="output", rules=rules("US"), texts=(" word",), whole=False)
        began = time.perf_counter()
        await filters.check(question, WAIT_S)
        print(f"start: {time.perf_counter() - began:.2f} s")
        durations_s = []
        for _ in range(QUESTIONS):
            began = time.perf_counter()
            await filters.check(question, WAIT_S)
            durations_s.append(time.perf_counter() - began)
        durations_s.sort()
        median_s, slow_s = durations_s[QUESTIONS // 2], durations_s[-5]
        print(f"a question: {median_s * 1e3:.2f} ms, of a hundred the slowest {slow_s * 1e3:.2f} ms")

        async def stream() -> None:
            for _ in range(100):
                await filters.check(question, WAIT_S)

        began = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(STREAMS)))
        print(f"{STREAMS} streams: {STREAMS * 100 / (time.perf_counter() - began):.0f} questions/s")
    finally:
        await client.close()
        directory.close()


def main() -> None:
    """Print the measurements in this process, then those of a filter process."""
    measure_looking()
    with tempfile.TemporaryDirectory() as data:
        env = {**os.environ, "KELVIN_DATA": data}
        process = subprocess.Popen([sys.executable, "-m", "kelvin.filters"], env=env, stderr=subprocess.DEVNULL)
        try:
            asyncio.run(measure_asking(Path(data)))
            print(f"memory: {psutil.Process(process.pid).memory_info().rss >> 20} MiB")
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
