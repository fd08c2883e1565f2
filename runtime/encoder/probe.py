"""Known answers of an encoder: the vector that the library computed at sealing, and the check that it is reproduced."""

import torch

from kelvin.contracts.artifacts.runtime_control import Probe
from runtime.encoder.model import EncoderModel
from runtime.encoder.recipe import Recipe
from runtime.models.binding import BoundModel
from runtime.models.probe import REFERENCES, probe_ids, tolerance_of, use_attention


def record(bound: BoundModel, recipe: Recipe) -> Probe:
    """Return the known answers of an encoder. Raises ValueError if the vector is not finite."""
    token_ids = probe_ids(bound.config.vocab_size)
    first, second = (_reference_vector(bound, recipe, token_ids, name) for name in REFERENCES)
    if not torch.isfinite(first).all():
        raise ValueError("the model's embedding is not finite")
    return Probe(
        token_ids=token_ids,
        top_ids=(),
        top_logits=(),
        tolerance=tolerance_of(first, second, bound.config.dtype),
        vector=tuple(first.tolist()),
    )


def _reference_vector(bound: BoundModel, recipe: Recipe, token_ids: tuple[int, ...], attention: str) -> torch.Tensor:
    device = next(bound.module.parameters()).device
    with use_attention(bound, attention):
        vectors = EncoderModel(bound, recipe, device).embed([token_ids])
    return vectors[0]


def verify(probe: Probe, vector: torch.Tensor) -> str | None:
    """Return what is wrong with `vector` [dimensions], in words; None if it matches."""
    if len(probe.vector) != vector.shape[0]:
        return f"{vector.shape[0]} dimensions instead of {len(probe.vector)}"
    if not bool(torch.isfinite(vector).all()):
        return "a vector that is not finite"
    error = float((vector - torch.tensor(probe.vector)).abs().max())
    return f"off by {error:.4g}, tolerance {probe.tolerance:.4g}" if error > probe.tolerance else None
