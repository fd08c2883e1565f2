"""Where a version's bytes are, how fast they can be loaded, and when a start is expected to finish."""

from typing import Annotated

from msgspec import Meta

from kelvin.contracts.wire import Fact, Wire


class TierRate(Wire, frozen=True):
    """Read speed of a tier, learned from `loads` loads (0: a guess): `fixed_s` plus bytes / `bytes_per_s`."""

    bytes_per_s: float
    fixed_s: float
    loads: int


class TierPlacement(Wire, frozen=True):
    """Response of `GET /v1/whereabouts` of the cache agent: a version's distinct chunks and bytes by tier.

    A chunk counts for the tier in which a lease would find it now. `rates` has the speed of each tier below host
    memory. `bytes_s` is how long loading these bytes would take, in seconds.
    """

    chunks_by_tier: dict[str, int]
    bytes_by_tier: dict[str, int]
    rates: dict[str, TierRate]
    bytes_s: float


class Forecast(Fact, frozen=True):
    """A running start of a version: when it should be ready, and how many bytes it has to load into memory.

    `tier` is the tier of the slowest bytes, if known. Like a failure, this is an event, not state.
    """

    tenant: str
    model: str
    version: str
    ready_in_ms: int
    bytes_to_bring: Annotated[int, Meta(ge=0)] = 0
    tier: str | None = None


class StartRow(Fact, frozen=True):
    """How long a start of a version at zero would take, as of the removal of its last replica.

    State until a replica exists again. Sent only if a start of this version, or of one of its size, was observed.
    """

    tenant: str
    model: str
    version: str
    start_ms: Annotated[int, Meta(ge=0)]
