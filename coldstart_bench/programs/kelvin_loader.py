"""Kelvin's loader: lease a version from the running cache agent and make tensors over it. Argument: its run directory.

It imports Kelvin, because Kelvin is measured: the steps of a runtime between promotion and bind, without the model.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from coldstart_bench.programs import load_server
from kelvin.ipc.socket_directory import SocketDirectory
from weightcache.client.device_copy import CudaLane, agreed_checksum, copy_to_device, view_tensors
from weightcache.client.lease import acquire

TIMEOUT_S = 600.0
tiers: dict[str, int] = {}
lanes: list[CudaLane] = []


def prepare(device: torch.device) -> None:
    """Prepare a device lane, as a parked standby does."""
    lanes.append(CudaLane(device))


def load(question: dict[str, Any], stack: ExitStack) -> load_server.Tensors:
    """Load the version with the digest `path`. All of it is verified when this returns."""
    lease = stack.enter_context(acquire(directory, question["tenant"], question["path"], TIMEOUT_S, progressive=True))
    checksum = agreed_checksum(lease.attestations)
    there = copy_to_device(lease, lanes[0], checksum).tensors if lanes else view_tensors(lease)
    lease.wait_until_whole()
    tiers.update(lease.bytes_by_tier)
    return there


directory = SocketDirectory(Path(sys.argv[1]))
load_server.serve(load, prepare=prepare, facts=lambda: {"bytes_by_tier": tiers})
