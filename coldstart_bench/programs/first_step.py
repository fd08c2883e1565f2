"""Measure the cost of the known answers: the first step of a version's engine, with the probe in the batch or without.

Argument: the run directory of the installation that has the version. Each line of JSON, {"tenant", "version", "ids",
"probe": true}, runs one first step in a fork of this process, over a lease of its own, and is answered with
{"seconds"}. No request is served, and no setting removes the probe from a served version: this is the engine alone,
composed as in a runtime.
"""

import sys
import time
from pathlib import Path

import torch

from coldstart_bench.programs.json_lines import answer_lines, run_in_fork
from kelvin.ipc.socket_directory import SocketDirectory
from runtime.app import preload
from runtime.drivers.interface import Generated, GenerationRequest, Sampling
from runtime.drivers.native.engine import ModelEngine
from runtime.lifecycle.weights import Weights, bind_verified, read_pinned_files
from weightcache.client.device_copy import view_tensors
from weightcache.client.lease import acquire

TIMEOUT_S, KV_BYTES = 600.0, 512 << 20


def first_step(directory: SocketDirectory, tenant: str, version: str, ids: list[int], probe: bool) -> float:
    """Return the seconds from the admitted request to its first token."""
    cpu = torch.device("cpu")
    lease = acquire(directory, tenant, version, TIMEOUT_S)
    weights = Weights(lease, view_tensors(lease))
    proven = bind_verified(version, weights, read_pinned_files(lease), cpu)
    known = proven.probe if probe else None
    engine = ModelEngine(proven.bound, proven.facts, version=version, kv_bytes=KV_BYTES, device=cpu, probe=known)
    asked = GenerationRequest(
        request_id="bench", prompt_ids=tuple(ids), sampling=Sampling(max_tokens=1, temperature=0.0)
    )
    if (refused := engine.admit(asked)) is not None:
        raise RuntimeError(refused.message)
    began = time.perf_counter()
    while engine.has_work:
        if any(isinstance(event, Generated) for event in engine.step()):
            return time.perf_counter() - began
    raise RuntimeError("the engine made no token")


def main() -> None:
    """Answer lines until stdin ends."""
    directory = SocketDirectory(Path(sys.argv[1]))
    preload.load()
    torch.set_num_threads(1)
    answer_lines(lambda **asked: run_in_fork(lambda: {"seconds": first_step(directory, **asked)}))


if __name__ == "__main__":
    main()
