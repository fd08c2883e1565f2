"""What a runtime depends on. A test takes each away."""

from typing import Final

from kelvin.contracts.dependency import Dependency

WEIGHTS: Final = Dependency(
    "weights",
    "a lease of the version's bytes from the cache agent; `KELVIN_RESTORE_S` sets the timeout",
    600.0,
    "of the version, at the activator",
    "a start waits 10 s for an agent to restart, then fails and says why; who has the weights needs no agent",
    "kelvin_restore_failures_total",
)
LEDGER: Final = Dependency(
    "ledger",
    "handing records of orphans over",
    10.0,
    "one batch at a time, with growing pauses",
    "records wait in the spool; who finds it there ships it",
    "kelvin_spool_backlog_records",
)
SEALS: Final = Dependency(
    "seals",
    "the snapshotter keeping known answers that were recorded here",
    30.0,
    "tried again after 1, 5 and 25 s, then no more",
    "this replica serves; the next one of its engine records them again",
    "kelvin_up",
)
FILTERS: Final = Dependency(
    "filters",
    "trying a version's filters when it is pushed; each piece of text has the time that its policy sets",
    10.0,
    "none: asked again each 0.02 s",
    "a push fails; a request is 503 `filter_failed`, or its text passes unseen: the version's policy",
    "kelvin_filter_unseen_total",
)
READER: Final = Dependency(
    "reader",
    "an activator that takes a piece of an answer",
    30.0,
    "its request is cancelled",
    "others go on; what was delivered is recorded",
    "kelvin_requests_total",
)

DEPENDENCIES: Final = (WEIGHTS, LEDGER, SEALS, FILTERS, READER)
