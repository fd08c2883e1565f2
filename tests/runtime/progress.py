"""What an engine reports of its progress within one step."""

import time
from itertools import pairwise

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from runtime.engine.interface import Engine


def check_progress(machine: Engine, layers: int) -> None:
    """Assert that `progressed_s` moves on with each of so many layers of the next step. A replica counts as hung if it
    stands still.
    """
    progress_s = [time.monotonic()]

    def after(module: nn.Module, _inputs: object, _output: object) -> None:
        if type(module).__name__.endswith("Layer"):
            progress_s.append(machine.progressed_s)

    hook = register_module_forward_hook(after)
    try:
        machine.step()
    finally:
        hook.remove()
    assert len(progress_s) == 1 + layers
    assert all(before < now for before, now in pairwise(progress_s)), progress_s
