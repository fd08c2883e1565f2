"""safetensors: `load_file`. It maps the file; bytes come when they are touched, and none is checked."""

from contextlib import ExitStack
from typing import Any

from safetensors.torch import load_file

from coldstart_bench.loaders import turns


def load(question: dict[str, Any], stack: ExitStack) -> turns.Tensors:
    """`path` is the file."""
    return dict(load_file(question["path"], device=question["device"]))


turns.serve(load)
