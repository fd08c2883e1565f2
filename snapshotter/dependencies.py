"""What the snapshotter depends on. A test takes each away."""

from typing import Final

from kelvin.blobstore.retrying_store import DEFAULT_BUDGET
from kelvin.contracts.dependency import Dependency

GATE: Final = Dependency(
    "gate",
    "a standby's word on an architecture, by the control plane or an engine; `KELVIN_GATE_S` sets the timeout",
    180.0,
    "none: the client asks again",
    "the push is `unavailable` before a byte of weights, and can be repeated",
    "kelvin_standbys",
)
SEAL: Final = Dependency(
    "seal",
    "a standby that binds the draft and records its answers; `KELVIN_SEAL_S` sets the timeout",
    1800.0,
    "none: the client asks again",
    "the commit is `unavailable`; repeated it goes on from what is staged",
    "kelvin_standbys",
)
REGISTRY: Final = Dependency(
    "registry",
    "the control plane taking a version in, naming versions, saying a tenant's limits",
    30.0,
    "none: the client asks again",
    "likewise; nothing is collected while nobody says what is named",
    "kelvin_up",
)
STORE: Final = Dependency(
    "store",
    "one attempt at an object, and more for its bytes at 1 MiB/s",
    DEFAULT_BUDGET.attempt_s,
    "four attempts, with drawn pauses",
    "pushes are `unavailable`, and can be repeated; models serve",
    "kelvin_up",
)

DEPENDENCIES: Final = (GATE, SEAL, REGISTRY, STORE)
