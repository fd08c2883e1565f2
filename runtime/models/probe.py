"""Known answers of a decoder: logits of the library's own attention, recorded at sealing, and the check of a replica.

Floats are compared within a tolerance, never by digest. Token ids are compared only where the reference is sure. The
engine decides which forward carries the probe and what waits for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from kelvin.contracts.artifacts.runtime_control import Probe
from runtime.models.binding import BoundModel

PROBE_TOKENS: Final = 8
TOP_LOGITS: Final = 8
REFERENCES: Final = ("sdpa", "eager")  # the first is recorded; its difference to the second shows the rounding
_STRIDE: Final = 2654435761  # Knuth's multiplicative hash, spreads the ids over any vocabulary, reproducibly
# Relative to the largest logit. With 16 layers, other batches and thread counts changed it by 4e-7 in float32 and by 0
# in bfloat16 (last place: 8e-3). A flipped exponent bit changes it by 1e-2 or more. Another CPU may round differently.
_RELATIVE: Final = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}
_MARGIN: Final = 4.0  # times the difference of the references


def probe_ids(vocab_size: int) -> tuple[int, ...]:
    """Return the teacher-forced token ids."""
    return tuple((index + 1) * _STRIDE % vocab_size for index in range(PROBE_TOKENS))


def record(bound: BoundModel) -> Probe:
    """Return the known answers of `bound`: the library's attention in the model's dtype on its device.

    Raises ValueError if they are not finite, because such a model has no right answers.
    """
    token_ids = probe_ids(bound.config.vocab_size)
    first, second = (_reference_logits(bound, token_ids, name) for name in REFERENCES)
    if not torch.isfinite(first).all():
        raise ValueError("the model's logits are not finite")
    top = first.topk(min(TOP_LOGITS, first.shape[-1]), dim=-1)
    return Probe(
        token_ids=token_ids,
        top_ids=tuple(map(tuple, top.indices.tolist())),
        top_logits=tuple(map(tuple, top.values.tolist())),
        tolerance=tolerance_of(first, second, bound.config.dtype),
    )


def _reference_logits(bound: BoundModel, token_ids: tuple[int, ...], attention: str) -> torch.Tensor:
    """Return logits [positions, V] in float32 by that attention."""
    device = next(bound.module.parameters()).device
    with use_attention(bound, attention), torch.inference_mode():
        answer = bound.module(input_ids=torch.tensor([token_ids], device=device), use_cache=False)
        logits: torch.Tensor = answer.logits[0].float().cpu()
    return logits


@contextmanager
def use_attention(bound: BoundModel, attention: str) -> Iterator[None]:
    """Compute with that attention of the library in this block. Restores the model's own attention."""
    previous = bound.config._attn_implementation
    bound.config._attn_implementation = attention
    try:
        yield
    finally:
        bound.config._attn_implementation = previous


def tolerance_of(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the tolerance, by dtype and size of the answers, and by how much two references differ."""
    by_dtype = _RELATIVE[dtype] * first.abs().max()
    by_references = _MARGIN * (first - second).abs().max()
    return float(torch.maximum(by_dtype, by_references))


def verify(probe: Probe, logits: torch.Tensor) -> str | None:
    """Return what is wrong with `logits` [positions, V], in words; None if they match.

    At each position the recorded ids must have their logits, and no other id may exceed the lowest of those. So the
    leading id is compared only if its lead in the reference is larger than rounding.
    """
    if logits.shape[0] != len(probe.token_ids):
        return f"{logits.shape[0]} positions instead of {len(probe.token_ids)}"
    if max(map(max, probe.top_ids)) >= logits.shape[1]:
        return f"a vocabulary of {logits.shape[1]}"
    logits = logits.float()
    if not bool(torch.isfinite(logits).all()):
        return "logits that are not finite"
    ids = torch.tensor(probe.top_ids, device=logits.device)
    expected = torch.tensor(probe.top_logits, device=logits.device)
    recorded_error = (logits.gather(1, ids) - expected).abs().amax(-1)
    other_excess = logits.scatter(1, ids, -torch.inf).amax(-1) - expected[:, -1]
    errors = torch.maximum(recorded_error, other_excess)
    worst = int(errors.argmax())
    error = float(errors[worst])
    return (
        f"position {worst} is off by {error:.4g}, tolerance {probe.tolerance:.4g}" if error > probe.tolerance else None
    )
