"""`python -m tests.runtime.measure [--large]`: measure the fork of a standby, and the bind of a version.

Real processes, medians of seven in turns. Not a test: other load counts. `--large` binds half a gigabyte of bfloat16
weights, which stay in the cache's memory, instead of a megabyte. Three cases: a new standby, a warmed-up one, and a
warmed-up one beside a fork. "Promotion" is the caller's time beyond `ready`: call, thread hand-over and answer.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kelvin.contracts.artifacts.runtime_control import BindResponse, RuntimeReport
from tests.runtime.processes import Installation, Standby, bind_of, run_installation
from tests.runtime.versions import make_llama
from tests.weightcache.kit import Version

ROUNDS = 7
LARGE: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}


@contextmanager
def measured(description: str) -> Iterator[tuple[Installation, Version]]:
    """An installation with a sealed version, of half a gigabyte with `--large`, otherwise a megabyte."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--large", action="store_true")
    large = parser.parse_args().large
    host_bytes = (1 << 30) if large else (16 << 20)
    with (
        tempfile.TemporaryDirectory() as directory,
        run_installation(Path(directory) / "data", host_bytes=host_bytes) as installation,
    ):
        version = installation.publish(make_llama(**(LARGE if large else {})))
        standby = installation.fork()
        standby.seal(version)
        standby.reap()
        print(f"{version.manifest.total_bytes / 1e6:.0f} MB; load {os.getloadavg()[0]:.1f}")
        yield installation, version


def _fork(installation: Installation) -> tuple[Standby, float]:
    began = time.perf_counter()
    standby = installation.fork()
    return standby, (time.perf_counter() - began) * 1e3


async def _promote(standby: Standby, version: Version) -> tuple[BindResponse, float]:
    """Bind over an open connection. Return the response and its milliseconds."""
    async with standby.client() as client:
        await client.call("GET", "/control/state", RuntimeReport, timeout_s=60.0)
        began = time.perf_counter()
        bound = await client.call("POST", "/control/bind", BindResponse, body=bind_of(version), timeout_s=60.0)
        return bound, (time.perf_counter() - began) * 1e3


def _say(name: str, values: Sequence[float]) -> None:
    print(f"{name:<28} {statistics.median(values):7.1f} ms   ({min(values):.1f} to {max(values):.1f})")


def main() -> None:
    with measured(str(__doc__)) as (installation, version):
        ways = {"just borne": (0.0, 0), "warmed up": (1.5, 0), "warmed up, beside a fork": (1.5, 1)}
        times: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
        for _ in range(ROUNDS):
            for name, (wait_s, beside) in ways.items():
                _bind(installation, version, wait_s, beside, times[name])
        for name, found in times.items():
            print(name)
            for what, values in found.items():
                _say(f"  {what}", values)


def _bind(
    installation: Installation, version: Version, wait_s: float, beside: int, times: dict[str, list[float]]
) -> None:
    """Fork, bind and end one standby, and add its times to the lists."""
    standby, parked_ms = _fork(installation)
    times.setdefault("fork to parked", []).append(parked_ms)
    time.sleep(wait_s)
    with ThreadPoolExecutor(max_workers=max(1, beside)) as others:
        forks = [others.submit(installation.fork) for _ in range(beside)]
        bound, took_ms = asyncio.run(_promote(standby, version))
        born_beside = [fork.result() for fork in forks]
    times.setdefault("bind, as the caller sees it", []).append(took_ms)
    for span in bound.spans:
        times.setdefault(f"bind to {span.stage.value}", []).append(span.after_us / 1e3)
    times.setdefault("promotion", []).append(took_ms - bound.spans[-1].after_us / 1e3)
    for each in (standby, *born_beside):
        each.end()


if __name__ == "__main__":
    main()
