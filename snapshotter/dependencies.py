"""The services that the snapshotter depends on. Tests take each one away in turn."""

from typing import Final

from kelvin.blobstore.retrying_store import DEFAULT_BUDGET
from kelvin.contracts.dependency import Dependency

GATE: Final = Dependency(
    "gate",
    "a standby's verdict on an architecture, through the control plane or an engine; `KELVIN_GATE_S` sets the timeout",
    180.0,
    "none: the client retries",
    "the push is `unavailable` before a byte of weights is sent, and can be repeated",
    "kelvin_standbys",
)
SEAL: Final = Dependency(
    "seal",
    "a standby that binds the draft and records its known answers; `KELVIN_SEAL_S` sets the timeout",
    1800.0,
    "none: the client retries",
    "the commit is `unavailable`; a repeated one continues from the staged data",
    "kelvin_standbys",
)
REGISTRY: Final = Dependency(
    "registry",
    "the control plane registering a version, listing named versions, or reporting a tenant's limits",
    30.0,
    "none: the client retries",
    "the commit is `unavailable` and can be repeated; nothing is collected meanwhile",
    "kelvin_up",
)
STORE: Final = Dependency(
    "store",
    "one attempt at an object, and more for its bytes at 1 MiB/s",
    DEFAULT_BUDGET.attempt_s,
    "four attempts, with random pauses",
    "pushes are `unavailable`, and can be repeated; models serve",
    "kelvin_up",
)

DEPENDENCIES: Final = (GATE, SEAL, REGISTRY, STORE)
