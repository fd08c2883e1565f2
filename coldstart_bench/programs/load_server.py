"""Shared code of the loaders of `kelvin bench load`: a fork for each load, and the consumer that reads every byte.

The parent only imports its library, so each load runs in a fresh process, as in a replica, without leftovers of another
load. Two times are measured: the load, until the tensors exist, and then the consumer. Imports nothing of Kelvin.
"""

import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from coldstart_bench.programs.json_lines import answer_lines, run_in_fork

Tensors = Mapping[str, torch.Tensor]
Load = Callable[[dict[str, Any], ExitStack], Tensors]
WORD = 8


def serve(
    load: Load,
    *,
    prepare: Callable[[torch.device], None] = lambda device: None,
    facts: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Answer each line of JSON by one load.

    `load` gets the line's fields and an exit stack that stays open while tensors are read; `path` names the file,
    `device` the target. `prepare` is the untimed preparation of a process that waits for work on a GPU. `facts` are
    added to the answer.
    """
    torch.set_num_threads(1)

    def measured(**question: Any) -> dict[str, Any]:
        return run_in_fork(lambda: {**_timed(load, prepare, question), **facts()})

    answer_lines(measured)


def _timed(load: Load, prepare: Callable[[torch.device], None], question: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(question["device"])
    if device.type == "cuda":  # creating a context costs every loader the same, so it is not timed
        torch.cuda.synchronize(device)
        prepare(device)
    with ExitStack() as stack:
        began = time.perf_counter()
        tensors = load(question, stack)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        loaded = time.perf_counter()
        checksum = consume(tensors)
        consumed = time.perf_counter()
        size = sum(tensor.nbytes for tensor in tensors.values())
    return {"load_s": loaded - began, "consume_s": consumed - loaded, "checksum": checksum, "bytes": size}


def consume(tensors: Tensors) -> int:
    """Read every byte once in one thread. Return a checksum modulo 2**64. It is the sum of 64-bit words of each tensor,
    weighted by the CRC-32 of the tensor's name.
    """
    return sum(zlib.crc32(name.encode()) * _sum(tensor) for name, tensor in tensors.items()) % 2**64


def _sum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    whole = flat.numel() // WORD * WORD
    if flat.device.type == "cuda":
        return int(flat[:whole].view(torch.int64).sum().item()) + int(flat[whole:].sum().item())
    raw = flat.numpy()
    return int(raw[:whole].view(np.int64).sum(dtype=np.int64)) + int(raw[whole:].sum(dtype=np.int64))
