"""What agents of different machines say to one another: HTTP/1.1 over mutual TLS (`kelvin/crypto/node_tls.py`).

`GET /v1/chunks/TENANT/DIGEST` is a chunk's bytes, also a range of them; `POST /v1/chunks/TENANT/have` says of many
chunks at once whether they are there, and tells the other node what is wanted here.
"""

from typing import Annotated, Final

import msgspec

from kelvin.contracts.artifacts.manifest import Digest
from kelvin.contracts.wire import Fact

MAX_DIGESTS: Final = 2048  # of one question: 140 kB
MAX_WAIT_S: Final = 5.0


class ChunkQuery(Fact, frozen=True):
    """The question. With `wait_s` it is answered once one of the chunks is there, or will not be."""

    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_DIGESTS)]
    node: Annotated[str, msgspec.Meta(max_length=64)] | None = None  # who wants them, where it can be asked for them
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0.0


class ChunkStates(Fact, frozen=True):
    """The answer: one letter for each chunk (`policy/ownership.ChunkState`), and a count that grows as bytes arrive."""

    node: str
    standings: str
    moved: int


def chunk_path(tenant: str, digest: str) -> str:
    """Return the path of a chunk's bytes."""
    return f"/v1/chunks/{tenant}/{digest}"


def query_path(tenant: str) -> str:
    """Return the path of the question `ChunkQuery`."""
    return f"/v1/chunks/{tenant}/have"
