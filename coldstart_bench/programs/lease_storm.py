"""Request leases of many versions from many agents at once, and measure when each arrives.

A line of JSON, {"runs": [run directories], "tenant", "versions": [digests]}, requests every version from every agent,
each in a thread of its own. The answer lists [agent index, version index, seconds or error text].
"""

import threading
import time
from pathlib import Path
from typing import Any

from coldstart_bench.programs.json_lines import answer_lines
from kelvin.contracts.artifacts.manifest import Manifest
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import decoder
from kelvin.ipc.socket_directory import SocketDirectory
from weightcache.client.lease import acquire
from weightcache.client.lease_protocol import Layout, LeaseReply

TIMEOUT_S = 600.0


def storm(runs: list[str], tenant: str, versions: list[str]) -> list[list[Any]]:
    """Return the results in the order in which the leases arrived."""
    gate, lock, ends = threading.Barrier(len(runs) * len(versions) + 1), threading.Lock(), list[list[Any]]()
    began = [0.0]

    def one(node: int, directory: SocketDirectory, number: int, version: str) -> None:
        gate.wait()
        try:
            acquire(directory, tenant, version, TIMEOUT_S).close()
            end: float | str = time.perf_counter() - began[0]
        except Refused as refused:
            end = refused.failure.message
        except Exception as error:  # any other error is a failed lease, too
            end = f"{type(error).__name__}: {error}"
        with lock:
            ends.append([node, number, end])

    threads = [
        threading.Thread(target=one, args=(node, directory, number, version))
        for node, directory in enumerate(map(SocketDirectory, map(Path, runs)))
        for number, version in enumerate(versions)
    ]
    for thread in threads:
        thread.start()
    began[0] = time.perf_counter()
    gate.wait()
    for thread in threads:
        thread.join()
    return ends


def main() -> None:
    """Answer lines until stdin ends."""
    for kind in (LeaseReply, Layout, Manifest):
        decoder(kind)  # build it here, so that it is not part of a measured time
    answer_lines(lambda **asked: {"ends": storm(**asked)})


if __name__ == "__main__":
    main()
