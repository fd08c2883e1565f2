"""How many standbys to fork now. Pure; forking is the fleet's work, how many there should be `standbys`' to say."""

from dataclasses import dataclass
from typing import Final

from contracts.doubling import Doubling

PAUSES: Final = Doubling(0.1, 1.0)
RESTORE_CORES: Final = 2  # that a start keeps busy: the runtime, and the agent, zygote or activator that work for it
HOLDS_S: Final = (
    1.0  # a start that takes longer moves bytes: a fork beside it costs it little, an empty pool others much
)
SETTLE_S: Final = 0.3  # after readiness comes the first prefill, which has the cores as well


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The pool as it is. `waiting` starts and jobs have no process; `starting` replicas hold cores (`holds_cores`)."""

    size: int
    parked: int
    forked: int  # on their way to be parked
    waiting: int
    starting: int
    cores: int


def holds_cores(since_s: float, *, restoring: bool) -> bool:
    """Whether a replica that began to restore, or to serve, so long ago still has the cores of its start."""
    return since_s < (HOLDS_S if restoring else SETTLE_S)


def to_fork(facts: PoolFacts) -> int:
    """What is waited for is forked at once; what the pool lacks as soon as there are cores that no start holds.

    A fork and its first imports take a core, and a start that shares its core with them is late by as much. So one
    core is one fork, and a start has its cores first.
    """
    urgent = facts.waiting - facts.forked - facts.parked
    missing = facts.size + urgent
    spare = facts.cores - RESTORE_CORES * facts.starting - facts.forked
    return max(0, urgent, min(missing, spare))


def backoff_s(failures: int) -> float:
    """Seconds before the next fork after so many births in a row came to nothing: 0.1 s doubled, at most 1 s.

    A zygote that came back is noticed within that second; one that bears the dead costs no more than a fork a second.
    """
    return 0.0 if failures == 0 else PAUSES.after(failures)
