"""How many standbys to fork now. Pure; forking is the fleet's work."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The pool as it is. `waiting` starts and jobs have no process; `restoring` runtimes are on a cold start."""

    size: int
    parked: int
    forked: int  # on their way to be parked
    waiting: int
    restoring: int


def to_fork(facts: PoolFacts) -> int:
    """What is waited for is forked at once; the pool itself is refilled only while nothing restores.

    A fork and its first imports take a core, and a restore that shares its core with them is late by as much.
    """
    urgent = facts.waiting - facts.forked - facts.parked
    if facts.restoring:
        return max(0, urgent)
    return max(0, urgent, facts.size + facts.waiting - facts.forked - facts.parked)


def backoff_s(failures: int) -> float:
    """Seconds before the next fork after so many births in a row came to nothing: 0.1 s doubled, at most 1 s.

    A zygote that came back is noticed within that second; one that bears the dead costs no more than a fork a second.
    """
    return 0.0 if failures == 0 else min(1.0, 0.1 * 2.0 ** min(failures - 1, 10))
