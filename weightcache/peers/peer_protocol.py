"""Messages between agents of different machines: HTTP/1.1 over mutual TLS (`kelvin/crypto/node_tls.py`).

`GET /v1/chunks/TENANT/DIGEST` returns a chunk's bytes or a range of them. `POST /v1/chunks/TENANT/have` returns the
states of many chunks, and tells the other node which chunks are wanted here.
"""

from typing import Annotated, Final

import msgspec

from kelvin.contracts.artifacts.manifest import Digest
from kelvin.contracts.wire import Fact

MAX_DIGESTS: Final = 2048  # digests in one query: 140 kB
MAX_WAIT_S: Final = 5.0


class ChunkQuery(Fact, frozen=True):
    """A query. With `wait_s`, it is answered once one of the chunks is there, or will not be."""

    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_DIGESTS)]
    node: Annotated[str, msgspec.Meta(max_length=64)] | None = None  # the node that wants them, if it serves others
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0.0


class ChunkStates(Fact, frozen=True):
    """The answer: one letter per chunk (`ownership_policy.ChunkState`), and a count that grows as bytes arrive."""

    node: str
    standings: str
    moved: int


def chunk_path(tenant: str, digest: str) -> str:
    """Return the path of a chunk's bytes."""
    return f"/v1/chunks/{tenant}/{digest}"


def query_path(tenant: str) -> str:
    """Return the path of a `ChunkQuery`."""
    return f"/v1/chunks/{tenant}/have"
