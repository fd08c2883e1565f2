"""`python -m tests.runtime.measure_sleep [--large]`: what a wake takes from either sleep, beside a start from zero.

Real processes, medians of seven rounds; in each all ways take turns: a process that sleeps with its weights, one that
has dropped them, a parked standby that is warmed up. The latter two with the version in the cache's memory, and on the
disk alone. From the call until it is ready, and until the first token of an answer; private memory while it waits. Not
a test: a machine's load is in it. `--large` takes half a gigabyte instead of a megabyte.
"""

import asyncio
import statistics
import time
from pathlib import Path

from kelvin.contracts.artifacts.runtime_control import BindResponse
from tests.runtime.measure import ROUNDS, measured
from tests.runtime.processes import Born, Installation, bind_of, poll_until
from tests.weightcache.kit import TENANT, Version, evict

PROMPT = {"prompt": list(range(4, 20)), "max_tokens": 1, "temperature": 0}
WARM_UP_S = 1.5
Times = dict[str, list[float]]


async def _serve(born: Born, version: Version, path: str) -> tuple[float, float]:
    """Milliseconds until the call is answered, and until an answer of one token is complete."""
    async with born.client() as client:
        async with client.session.get("http://rt/healthz") as answer:  # the control plane has its connection, too
            await answer.read()
        began = time.perf_counter()
        await client.call("POST", path, BindResponse, body=bind_of(version), timeout_s=60.0)
        ready = time.perf_counter()
        async with born.request(client, PROMPT, f"r{began}") as answer:
            await answer.read()
        return (ready - began) * 1e3, (time.perf_counter() - began) * 1e3


def _private_mb(born: Born) -> float:
    """Memory that its end would give back."""
    lines = Path(f"/proc/{born.pid}/smaps_rollup").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    return (found["Private_Clean"] + found["Private_Dirty"]) / 1024


def _evict(house: Installation) -> None:
    def gone() -> bool | None:
        try:
            asyncio.run(evict(house.directory, "host", None, None))
        except Exception:  # a process that was killed just now holds it yet
            return None
        return True

    poll_until("the host tier is empty", gone)


def _zero(house: Installation, version: Version, on_disk: bool, times: Times) -> None:
    born = house.fork()
    time.sleep(WARM_UP_S)
    if on_disk:
        _evict(house)
    _note(times, _private_mb(born), asyncio.run(_serve(born, version, "/control/bind")))
    born.end()


def _asleep(house: Installation, version: Version, on_disk: bool, times: Times, *, drop: bool) -> None:
    born = house.fork()
    time.sleep(WARM_UP_S)
    asyncio.run(_serve(born, version, "/control/bind"))
    born.sleep()
    if drop:
        born.drop()
    if on_disk:
        _evict(house)
    _note(times, _private_mb(born), asyncio.run(_serve(born, version, "/control/wake")))
    born.end()


def _note(times: Times, held_mb: float, took: tuple[float, float]) -> None:
    for name, value in zip(("ready", "token", "MB"), (*took, held_mb), strict=True):
        times.setdefault(name, []).append(value)


def main() -> None:
    """Print the table."""
    with measured(str(__doc__)) as (house, version):
        files = [house.data / "cache" / TENANT / digest[:2] / digest for digest in version.digests]
        poll_until("it is on the disk", lambda: all(path.exists() for path in files) or None)
        times: dict[str, Times] = {}
        for _ in range(ROUNDS):
            for place in ("host", "nvme"):
                _zero(house, version, place == "nvme", times.setdefault(f"zero, {place}", {}))
                drop = times.setdefault(f"asleep2, {place}", {})
                _asleep(house, version, place == "nvme", drop, drop=True)
            _asleep(house, version, False, times.setdefault("asleep", {}), drop=False)
        for way, found in sorted(times.items()):
            ready, token, held = (found[name] for name in ("ready", "token", "MB"))
            middle = f"{statistics.median(ready):7.1f} ms ready ({min(ready):.1f} to {max(ready):.1f})"
            print(f"{way:<14} {middle}, {statistics.median(token):7.1f} ms token; {statistics.median(held):.0f} MB")


if __name__ == "__main__":
    main()
