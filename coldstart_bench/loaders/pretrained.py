"""transformers: `from_pretrained` of a directory, what it imports imported beforehand. It maps and checks nothing."""

from contextlib import ExitStack
from typing import Any

import transformers.models.llama.modeling_llama  # noqa: F401 - before it is timed
from transformers import AutoModelForCausalLM

from coldstart_bench.loaders import turns


def load(question: dict[str, Any], stack: ExitStack) -> turns.Tensors:
    """`path` is the directory."""
    model = AutoModelForCausalLM.from_pretrained(question["path"], dtype="auto").eval()
    found: turns.Tensors = model.to(question["device"]).state_dict()
    return found


turns.serve(load)
