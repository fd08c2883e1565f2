"""fastsafetensors without GPUDirect Storage: reads in threads into a buffer, tensors over it; none is checked."""

from contextlib import ExitStack
from typing import Any

from fastsafetensors import fastsafe_open

from coldstart_bench.loaders import turns


def load(question: dict[str, Any], stack: ExitStack) -> turns.Tensors:
    """`path` is the file; its buffer lives as long as it is open."""
    opened = stack.enter_context(fastsafe_open([question["path"]], nogds=True, device=question["device"]))
    return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it can't be iterated


turns.serve(load)
