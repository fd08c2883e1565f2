"""Which routes serve which kind of version. The activator asks before it wakes one, a replica before it computes."""

from collections.abc import Mapping
from typing import Final

from contracts.errors import Failure, InvalidRequest
from contracts.manifest import Kind

PATHS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "generate": ("/v1/chat/completions", "/v1/completions"),
    "embed": ("/v1/embeddings",),
}
_DOES: Final[Mapping[Kind, str]] = {"generate": "generates text", "embed": "embeds text"}


def other_kind(model: str, kind: Kind) -> Failure:
    """What is said where a route of another kind is asked of a model of this one."""
    return InvalidRequest("model", model, f"this model {_DOES[kind]}: ask {' or '.join(PATHS[kind])}")
