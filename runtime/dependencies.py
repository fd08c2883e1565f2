"""The services that a runtime depends on. Tests take each one away in turn."""

from typing import Final

from kelvin.contracts.dependency import Dependency

WEIGHTS: Final = Dependency(
    "weights",
    "a lease of the version's bytes from the cache agent; `KELVIN_RESTORE_S` sets the timeout",
    600.0,
    "of the version, at the activator",
    "a restore waits 10 s for the agent (a pod's start 60 s), then fails with the reason; "
    "a replica with its weights needs no agent",
    "kelvin_restore_failures_total",
)
LEDGER: Final = Dependency(
    "ledger",
    "sending records of requests that no activator confirmed",
    10.0,
    "one batch at a time, with growing pauses",
    "records wait in the spool; the next process that finds the spool ships it",
    "kelvin_spool_backlog_records",
)
SEALS: Final = Dependency(
    "seals",
    "the snapshotter storing known answers that were recorded here",
    30.0,
    "repeated after 1, 5 and 25 s, then given up",
    "this replica serves; the next replica with the same engine records them again",
    "kelvin_up",
)
FILTERS: Final = Dependency(
    "filters",
    "a trial of a version's filters during its push; each text has the time that the version's policy sets",
    10.0,
    "none: repeated every 0.02 s",
    "a push fails; by the version's policy a request is 503 `filter_failed`, or its text passes unchecked",
    "kelvin_filter_unseen_total",
)
READER: Final = Dependency(
    "reader",
    "an activator reading a piece of an answer",
    30.0,
    "its request is cancelled",
    "other requests continue; the delivered part is recorded",
    "kelvin_requests_total",
)

DEPENDENCIES: Final = (WEIGHTS, LEDGER, SEALS, FILTERS, READER)
