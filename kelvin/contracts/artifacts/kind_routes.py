"""Which routes serve which kind of version. The activator asks before it wakes one, a replica before it computes."""

from collections.abc import Mapping
from typing import Final

from kelvin.contracts.artifacts.manifest import Kind
from kelvin.contracts.errors import Failure, InvalidRequest

# How a replica is asked; from outside the model's name is in the path: /v2/models/M/infer.
INFER_PATH: Final = "/v2/infer"
ROUTES_BY_KIND: Final[Mapping[Kind, tuple[str, ...]]] = {
    "generate": ("/v1/chat/completions", "/v1/completions"),
    "embed": ("/v1/embeddings",),
    "predict": (INFER_PATH,),
}
_KIND_VERBS: Final[Mapping[Kind, str]] = {"generate": "generates text", "embed": "embeds text", "predict": "predicts"}


def wrong_kind_failure(model: str, kind: Kind) -> Failure:
    """What is said where a route of another kind is asked of a model of this one."""
    routes = (f"/v2/models/{model}/infer",) if kind == "predict" else ROUTES_BY_KIND[kind]
    return InvalidRequest("model", model, f"this model {_KIND_VERBS[kind]}: ask {' or '.join(routes)}")
