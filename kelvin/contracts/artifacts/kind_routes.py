"""Routes by kind of version. The activator checks them before it wakes a version, a replica before it computes."""

from collections.abc import Mapping
from typing import Final

from kelvin.contracts.artifacts.manifest import Kind
from kelvin.contracts.errors import Failure, InvalidRequest

# The path at a replica. Clients put the model's name into the path: /v2/models/M/infer.
INFER_PATH: Final = "/v2/infer"
ROUTES_BY_KIND: Final[Mapping[Kind, tuple[str, ...]]] = {
    "generate": ("/v1/chat/completions", "/v1/completions"),
    "embed": ("/v1/embeddings",),
    "predict": (INFER_PATH,),
}
_KIND_VERBS: Final[Mapping[Kind, str]] = {"generate": "generates text", "embed": "embeds text", "predict": "predicts"}


def wrong_kind_failure(model: str, kind: Kind) -> Failure:
    """Return the failure for a request whose route does not fit the model's kind."""
    routes = (f"/v2/models/{model}/infer",) if kind == "predict" else ROUTES_BY_KIND[kind]
    return InvalidRequest("model", model, f"this model {_KIND_VERBS[kind]}: ask {' or '.join(routes)}")
