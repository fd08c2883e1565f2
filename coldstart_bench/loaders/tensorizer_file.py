"""tensorizer: `TensorDeserializer` of a `.tensors` file, as its documentation has it. Argument: `verify` for hashes."""

import sys
from contextlib import ExitStack
from typing import Any

from tensorizer import TensorDeserializer

from coldstart_bench.loaders import turns


def load(question: dict[str, Any], stack: ExitStack) -> turns.Tensors:
    """`path` is the file."""
    verify = "verify" in sys.argv[1:]
    return dict(TensorDeserializer(question["path"], device=question["device"], verify_hash=verify))


turns.serve(load)
