"""`python -m tests.runtime.measure_sleep [--large]`: measure wakes from both sleep levels, and starts from zero.

Real processes, medians of seven rounds, all cases in turns: asleep with weights (level 1), without them (level 2),
and a warmed-up standby; the last two with the version in host memory and on disk. Times until ready and until the first
token, and private memory during the wait. Not a test: other load counts. `--large` uses half a gigabyte.
"""

import asyncio
import statistics
import time
from pathlib import Path

from kelvin.contracts.artifacts.runtime_control import BindResponse
from tests.runtime.measure import ROUNDS, measured
from tests.runtime.processes import Installation, Standby, bind_of, poll_until
from tests.weightcache.kit import TENANT, Version, evict

PROMPT = {"prompt": list(range(4, 20)), "max_tokens": 1, "temperature": 0}
WARM_UP_S = 1.5
Times = dict[str, list[float]]


async def _serve(standby: Standby, version: Version, path: str) -> tuple[float, float]:
    """Return the milliseconds until the call is answered, and until an answer of one token."""
    async with standby.client() as client:
        async with client.session.get(
            "http://rt/healthz"
        ) as answer:  # open the connection, as the control plane has one
            await answer.read()
        began = time.perf_counter()
        await client.call("POST", path, BindResponse, body=bind_of(version), timeout_s=60.0)
        ready = time.perf_counter()
        async with standby.request(client, PROMPT, f"r{began}") as answer:
            await answer.read()
        return (ready - began) * 1e3, (time.perf_counter() - began) * 1e3


def _private_mb(standby: Standby) -> float:
    """Return the memory that the process's end would free, in MiB."""
    lines = Path(f"/proc/{standby.pid}/smaps_rollup").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    return (found["Private_Clean"] + found["Private_Dirty"]) / 1024


def _evict(installation: Installation) -> None:
    def gone() -> bool | None:
        try:
            asyncio.run(evict(installation.directory, "host", None, None))
        except Exception:  # a process that was just killed may still hold a slab
            return None
        return True

    poll_until("the host tier is empty", gone)


def _zero(installation: Installation, version: Version, on_disk: bool, times: Times) -> None:
    standby = installation.fork()
    time.sleep(WARM_UP_S)
    if on_disk:
        _evict(installation)
    _note(times, _private_mb(standby), asyncio.run(_serve(standby, version, "/control/bind")))
    standby.end()


def _asleep(installation: Installation, version: Version, on_disk: bool, times: Times, *, drop: bool) -> None:
    standby = installation.fork()
    time.sleep(WARM_UP_S)
    asyncio.run(_serve(standby, version, "/control/bind"))
    standby.sleep()
    if drop:
        standby.drop()
    if on_disk:
        _evict(installation)
    _note(times, _private_mb(standby), asyncio.run(_serve(standby, version, "/control/wake")))
    standby.end()


def _note(times: Times, held_mb: float, took: tuple[float, float]) -> None:
    for name, value in zip(("ready", "token", "MB"), (*took, held_mb), strict=True):
        times.setdefault(name, []).append(value)


def main() -> None:
    with measured(str(__doc__)) as (installation, version):
        files = [installation.data / "cache" / TENANT / digest[:2] / digest for digest in version.digests]
        poll_until("it is on the disk", lambda: all(path.exists() for path in files) or None)
        times: dict[str, Times] = {}
        for _ in range(ROUNDS):
            for place in ("host", "nvme"):
                _zero(installation, version, place == "nvme", times.setdefault(f"zero, {place}", {}))
                drop = times.setdefault(f"asleep2, {place}", {})
                _asleep(installation, version, place == "nvme", drop, drop=True)
            _asleep(installation, version, False, times.setdefault("asleep", {}), drop=False)
        for way, found in sorted(times.items()):
            ready, token, held = (found[name] for name in ("ready", "token", "MB"))
            middle = f"{statistics.median(ready):7.1f} ms ready ({min(ready):.1f} to {max(ready):.1f})"
            print(f"{way:<14} {middle}, {statistics.median(token):7.1f} ms token; {statistics.median(held):.0f} MB")


if __name__ == "__main__":
    main()
