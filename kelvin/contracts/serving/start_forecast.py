"""Where a version's bytes are, how fast they would come, and when a start is expected to be over."""

from typing import Annotated

from msgspec import Meta

from kelvin.contracts.wire import Fact, Wire


class TierRate(Wire, frozen=True):
    """How fast a tier brings bytes, learned from `loads` loads (0: a guess): `fixed_s`, and so many bytes a second."""

    bytes_per_s: float
    fixed_s: float
    loads: int


class TierPlacement(Wire, frozen=True):
    """`GET /v1/whereabouts` of the cache agent: distinct chunks of a version, and their bytes, by the tier in which a
    lease would find them now; of each tier below the host's how fast it is, and how long these bytes would take.
    """

    chunks_by_tier: dict[str, int]
    bytes_by_tier: dict[str, int]
    rates: dict[str, TierRate]
    bytes_s: float


class Forecast(Fact, frozen=True):
    """A start of the version is under way: when it is expected to be ready, how many bytes have to be brought into
    memory for it, and from which tier the slowest of them, where that is known. News, not state, like a failure.
    """

    tenant: str
    model: str
    version: str
    ready_in_ms: int
    bytes_to_bring: Annotated[int, Meta(ge=0)] = 0
    tier: str | None = None


class StartRow(Fact, frozen=True):
    """Of a version at zero: how long a start would take, as it was when its last replica went. State, until a replica
    is there again; only of versions of which, or of whose size, a start was seen.
    """

    tenant: str
    model: str
    version: str
    start_ms: Annotated[int, Meta(ge=0)]
