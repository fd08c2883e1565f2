"""A warm-up runs a decoder's restore and leaves nothing changed."""

import torch

from runtime.app.warmup import WarmUp
from tests.runtime.restoring import sealed_lease
from tests.runtime.versions import MemoryLease, make_llama


def test_warm_up_runs_every_step_of_a_restore() -> None:
    """Each step works, and can be repeated."""
    for _ in range(2):
        for step in WarmUp().steps:
            step()


def test_warm_up_leaves_no_state() -> None:
    """torch's defaults are unchanged, and the fast binding of the next model is exact."""
    defaults = torch.get_default_dtype(), torch.is_grad_enabled()
    for step in WarmUp().steps:
        step()
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == defaults
    (attestation,) = sealed_lease(MemoryLease(make_llama(seed=3))).attestations
    assert attestation.fast_bind
