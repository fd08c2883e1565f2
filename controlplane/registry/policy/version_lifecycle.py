"""The life of a version: which events move it where. Pure; storing the state is the registry's work.

A version is immutable, so only what was learned of its bytes moves: a restore that found them broken makes it faulty,
and one that succeeded, or a push that found all of them good, makes it ready again. A faulty version can still be asked
for by its digest, which tries the restore anew, but no alias moves to it. A deleted version is not served and may lose
its bytes at any time; its row stays, and pushing the same again brings it back.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from kelvin.contracts.errors import Conflict, Refused


class VersionState(StrEnum):
    """Where a version is."""

    ABSENT = "absent"
    READY = "ready"
    FAULTY = "faulty"
    DELETED = "deleted"


class VersionEvent(StrEnum):
    """What happened to it."""

    PUBLISHED = "published"
    RESTORED = "restored"
    FOUND_BROKEN = "found_broken"
    DELETED = "deleted"


class IllegalVersionEvent(ValueError):
    """The event can't happen in that state; the state stays as it was."""


TRANSITIONS: Final[dict[tuple[VersionState, VersionEvent], VersionState]] = {
    (VersionState.ABSENT, VersionEvent.PUBLISHED): VersionState.READY,
    (VersionState.READY, VersionEvent.PUBLISHED): VersionState.READY,
    (VersionState.READY, VersionEvent.RESTORED): VersionState.READY,
    (VersionState.READY, VersionEvent.FOUND_BROKEN): VersionState.FAULTY,
    (VersionState.FAULTY, VersionEvent.PUBLISHED): VersionState.READY,
    (VersionState.FAULTY, VersionEvent.RESTORED): VersionState.READY,
    (VersionState.FAULTY, VersionEvent.FOUND_BROKEN): VersionState.FAULTY,
    (VersionState.READY, VersionEvent.DELETED): VersionState.DELETED,
    (VersionState.FAULTY, VersionEvent.DELETED): VersionState.DELETED,
    (VersionState.DELETED, VersionEvent.DELETED): VersionState.DELETED,
    (VersionState.DELETED, VersionEvent.PUBLISHED): VersionState.READY,
}

# Failures of a restore that speak about the version's bytes; all others are about the machine.
_VERSION_FAULT_CODES: Final = frozenset(
    {
        "attestation_invalid", "chunk_corrupt", "chunk_missing", "manifest_corrupt", "manifest_missing",
        "pack_corrupt", "probe_failed",
    }
)  # fmt: skip


def move(state: VersionState, event: VersionEvent) -> VersionState:
    """The state after the event. Raises IllegalVersionEvent."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalVersionEvent(f"a version that is {state} can't be {event}") from None


def check_unused(model: str, aliases: Sequence[str], running: int) -> None:
    """A model is deleted when nobody relies on it, unless that is asked for. Raises Refused(Conflict)."""
    in_the_way = [f"the alias '{alias}' names a version of it" for alias in sorted(aliases)]
    if running:
        in_the_way.append(f"replicas run {running} of its versions")
    if in_the_way:
        raise Refused(
            Conflict(f"model '{model}'", f"{' and '.join(in_the_way)}; with `force` it is deleted all the same")
        )


def is_version_fault(code: str) -> bool:
    """Whether a failure of this code says that the version itself is broken."""
    return code in _VERSION_FAULT_CODES
