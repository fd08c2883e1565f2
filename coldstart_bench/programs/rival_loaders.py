"""Rival loaders, each by its own library. Arguments: the loader's name; `verify` to check tensorizer's hashes.

Only the chosen library is imported, before the first load.
"""

import json
import mmap
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from coldstart_bench.programs import load_server

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def tensorizer(verify: bool) -> load_server.Load:
    """Load a `.tensors` file with `TensorDeserializer`, as in its documentation."""
    from tensorizer import TensorDeserializer

    return lambda question, _: dict(TensorDeserializer(question["path"], device=question["device"], verify_hash=verify))


def safetensors(_: bool) -> load_server.Load:
    """Load with `load_file`. It maps the file and reads bytes when they are touched. Nothing is verified."""
    from safetensors.torch import load_file

    return lambda question, _: dict(load_file(question["path"], device=question["device"]))


def mapped(_: bool) -> load_server.Load:
    """Map a safetensors file by hand: header, one private mapping, views. The best that the page cache can do."""

    def load(question: dict[str, Any], stack: ExitStack) -> load_server.Tensors:
        with open(question["path"], "rb") as file:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch warns about read-only memory
        (length,) = struct.unpack("<Q", whole[:8])
        header = json.loads(whole[8 : 8 + length])
        raw = torch.from_numpy(np.frombuffer(whole, np.uint8))
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                low, high = (8 + length + at for at in entry["data_offsets"])
                found[name] = raw[low:high].view(TYPES[entry["dtype"]]).view(entry["shape"]).to(question["device"])
        return found

    return load


def runai(_: bool) -> load_server.Load:
    """Load with Run:ai model streamer: its threads read, tensors come as they are complete. Nothing is verified."""
    from runai_model_streamer import SafetensorsStreamer

    def load(question: dict[str, Any], stack: ExitStack) -> load_server.Tensors:
        streamer = stack.enter_context(SafetensorsStreamer())
        streamer.stream_file(question["path"])
        return {name: tensor.to(question["device"]) for name, tensor in streamer.get_tensors()}

    return load


def fastsafetensors(_: bool) -> load_server.Load:
    """Load without GPUDirect Storage: threads read into a buffer, tensors point into it. Nothing is verified."""
    from fastsafetensors import fastsafe_open

    def load(question: dict[str, Any], stack: ExitStack) -> load_server.Tensors:
        # The buffer lives as long as the file is open.
        opened = stack.enter_context(fastsafe_open([question["path"]], nogds=True, device=question["device"]))
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it can't be iterated

    return load


def from_pretrained(_: bool) -> load_server.Load:
    """Load a directory with transformers, after its imports. It maps the files and verifies nothing."""
    import transformers.models.llama.modeling_llama  # noqa: F401 - before it is timed
    from transformers import AutoModelForCausalLM

    def load(question: dict[str, Any], stack: ExitStack) -> load_server.Tensors:
        model = AutoModelForCausalLM.from_pretrained(question["path"], dtype="auto").eval()
        found: load_server.Tensors = model.to(question["device"]).state_dict()
        return found

    return load


LOADERS: dict[str, Callable[[bool], load_server.Load]] = {
    "tensorizer": tensorizer,
    "safetensors": safetensors,
    "mmap": mapped,
    "runai": runai,
    "fastsafetensors": fastsafetensors,
    "from_pretrained": from_pretrained,
}

load_server.serve(LOADERS[sys.argv[1]]("verify" in sys.argv[2:]))
