"""Decide whether an encoder may be served.

A forward without weights shows the order in which tensors are used. The probe checks that the vectors are right,
because attention is the library's own.
"""

from typing import Final

import torch
from torch import nn

from kelvin.contracts.artifacts.runtime_control import GateFacts, GateJob
from runtime.encoder.recipe import MODULES, read_recipe
from runtime.models import architecture_gate
from runtime.models.artifact_rejection import artifact_rejected, public_message
from runtime.models.binding import TORCH_DTYPES
from runtime.models.families import ENCODERS
from runtime.models.pinned_files import CONFIG

_FORBIDDEN: Final = {
    "is_decoder": "attends only to earlier tokens",
    "add_cross_attention": "attends to another model's output",
}


def check_architecture(job: GateJob) -> GateFacts:
    """Return the facts of a servable encoder. Raises `Refused(ArtifactRejected)` with file, module or tensor."""
    recipe = read_recipe({path: text.encode() for path, text in job.recipe.items()})
    values = architecture_gate.read_config_values(job.config_json)
    for key, reason in _FORBIDDEN.items():
        if values.get(key):
            raise artifact_rejected(CONFIG, f"'{key}': {reason}")
    if values.get("position_embedding_type", "absolute") != "absolute":
        raise artifact_rejected(CONFIG, "position_embedding_type: must be 'absolute'")
    family = architecture_gate.find_family(values, ENCODERS)
    tensors = {name: facts for name, facts in job.tensors.items() if name not in family.ignored_tensors}
    dtype = architecture_gate.find_dtype(values, tensors)
    module, config = architecture_gate.build_meta_skeleton(
        family, job.config_json, TORCH_DTYPES[dtype], len(tensors), family.attention
    )
    stored = architecture_gate.stored_shapes(family, module, tensors)
    architecture_gate.check_tensors(module, stored, tensors)
    used, width = _forward(module)
    if unused := sorted(set(tensors) - set(used)):
        raise artifact_rejected(unused[0], "no forward of this architecture uses it")
    if recipe.width not in (None, width):
        raise artifact_rejected(MODULES, f"the pooling takes {recipe.width} dimensions, the encoder gives {width}")
    positions = config.max_position_embeddings - family.reserved_positions(config)
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
    """Return the parameters in the order of first use, and the width of the output."""
    with architecture_gate.record_parameter_order(module) as used:
        try:
            with torch.inference_mode(), torch.device("meta"):
                hidden = module(input_ids=torch.arange(architecture_gate.TRACED_TOKENS)[None]).last_hidden_state
        except Exception as error:
            raise artifact_rejected(CONFIG, f"a forward without weights fails: {public_message(error)}") from error
    if hidden.ndim != 3 or hidden.shape[:2] != (1, architecture_gate.TRACED_TOKENS):
        raise artifact_rejected(CONFIG, f"the output has shape {list(hidden.shape)}")
    return used, hidden.shape[2]
