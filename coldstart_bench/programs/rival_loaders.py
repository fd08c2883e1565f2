"""What a user would pick instead, each by its own library. Arguments: which one; `verify` for tensorizer's hashes.

A library is imported before the first load, and no other one is.
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
    """`TensorDeserializer` of a `.tensors` file, as its documentation has it."""
    from tensorizer import TensorDeserializer

    return lambda question, _: dict(TensorDeserializer(question["path"], device=question["device"], verify_hash=verify))


def safetensors(_: bool) -> load_server.Load:
    """`load_file`. It maps the file; bytes come when they are touched, and none is checked."""
    from safetensors.torch import load_file

    return lambda question, _: dict(load_file(question["path"], device=question["device"]))


def mapped(_: bool) -> load_server.Load:
    """A safetensors file mapped by hand: header, one read-only mapping, views. What the page cache can do at best."""

    def load(question: dict[str, Any], stack: ExitStack) -> load_server.Tensors:
        with open(question["path"], "rb") as file:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private: torch warns of what is read-only
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
    """Run:ai model streamer: reads in threads of its own, tensors as they come; none is checked."""
    from runai_model_streamer import SafetensorsStreamer

    def load(question: dict[str, Any], stack: ExitStack) -> load_server.Tensors:
        streamer = stack.enter_context(SafetensorsStreamer())
        streamer.stream_file(question["path"])
        return {name: tensor.to(question["device"]) for name, tensor in streamer.get_tensors()}

    return load


def fastsafetensors(_: bool) -> load_server.Load:
    """Without GPUDirect Storage: reads in threads into a buffer, tensors over it; none is checked."""
    from fastsafetensors import fastsafe_open

    def load(question: dict[str, Any], stack: ExitStack) -> load_server.Tensors:
        # The buffer lives as long as the file is open.
        opened = stack.enter_context(fastsafe_open([question["path"]], nogds=True, device=question["device"]))
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it can't be iterated

    return load


def from_pretrained(_: bool) -> load_server.Load:
    """transformers, of a directory, what it imports imported beforehand. It maps and checks nothing."""
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
