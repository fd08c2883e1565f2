"""Run:ai model streamer: reads in threads of its own, tensors as they come; none is checked."""

from contextlib import ExitStack
from typing import Any

from runai_model_streamer import SafetensorsStreamer

from coldstart_bench.loaders import turns


def load(question: dict[str, Any], stack: ExitStack) -> turns.Tensors:
    """`path` is the file."""
    streamer = stack.enter_context(SafetensorsStreamer())
    streamer.stream_file(question["path"])
    return {name: tensor.to(question["device"]) for name, tensor in streamer.get_tensors()}


turns.serve(load)
