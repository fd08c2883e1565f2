"""Examine an encoder: may it be served?

The gate's forward says in which order tensors are used; that answers are right is the probe's business, as attention
is the library's own.
"""

from typing import Final

import torch
from torch import nn

from contracts.jobs import GateFacts, GateJob
from runtime import gate
from runtime.binding import TORCH_DTYPES
from runtime.encoder.recipe import MODULES, read_recipe
from runtime.families import ENCODERS
from runtime.pinned import CONFIG

_FORBIDDEN: Final = {
    "is_decoder": "attends to what came before alone",
    "add_cross_attention": "attends to another model's output",
}


def check_architecture(job: GateJob) -> GateFacts:
    """The facts of an encoder that may be served. Raises `Refused(ArtifactRejected)` naming file, module or tensor."""
    recipe = read_recipe({path: text.encode() for path, text in job.recipe.items()})
    values = gate.config_values(job.config_json)
    for key, reason in _FORBIDDEN.items():
        if values.get(key):
            raise gate.artifact_rejected(CONFIG, f"'{key}': {reason}")
    if values.get("position_embedding_type", "absolute") != "absolute":
        raise gate.artifact_rejected(CONFIG, "position_embedding_type: must be 'absolute'")
    family = gate.family_of(values, ENCODERS)
    tensors = {name: facts for name, facts in job.tensors.items() if name not in family.ignored}
    dtype = gate.dtype_of(values, tensors)
    module, config = gate.skeleton_on_meta(family, job.config_json, TORCH_DTYPES[dtype], len(tensors), family.attention)
    stored = gate.stored_shapes(family, module, tensors)
    gate.check_tensors(module, stored, tensors)
    used, width = _forward(module)
    if unused := sorted(set(tensors) - set(used)):
        raise gate.artifact_rejected(unused[0], "no forward of this architecture uses it")
    if recipe.width not in (None, width):
        raise gate.artifact_rejected(MODULES, f"the pooling takes {recipe.width} dimensions, the encoder gives {width}")
    positions = config.max_position_embeddings - family.positions_taken(config)
    return GateFacts(
        architecture=values["architectures"][0],
        dtype=dtype,
        layers=config.num_hidden_layers,
        kv_heads=0,
        head_dim=0,
        value_dim=0,
        vocab_size=config.vocab_size,
        max_positions=min(positions, recipe.max_tokens or positions),
        kv_bytes_per_token=0,
        first_use=tuple(name for name in used if name in tensors),
        kind="embed",
        dimensions=width,
    )


def _forward(module: nn.Module) -> tuple[list[str], int]:
    """Parameters in the order of first use, and the width of what comes out."""
    with gate.record_parameter_order(module) as used:
        try:
            with torch.inference_mode(), torch.device("meta"):
                hidden = module(input_ids=torch.arange(gate.TOKENS)[None]).last_hidden_state
        except Exception as error:
            raise gate.artifact_rejected(
                CONFIG, f"a forward without weights fails: {gate.public_message(error)}"
            ) from error
    if hidden.ndim != 3 or hidden.shape[:2] != (1, gate.TOKENS):
        raise gate.artifact_rejected(CONFIG, f"the output comes out as {list(hidden.shape)}")
    return used, hidden.shape[2]
