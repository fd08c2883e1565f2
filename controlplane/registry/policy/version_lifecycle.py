"""Define the life cycle of a version: which event leads from which state to which. Pure; `registry.py` stores the
state.

A version is immutable, so its state is what was learned of its bytes. A restore that finds them damaged makes it
faulty. A successful restore, or a push that verified all of them, makes it ready again. A faulty version can still be
requested by its digest, which tries a restore again, but no alias moves to it. A deleted version is not served and may
lose its bytes at any time. Its row stays, and pushing the same bytes brings it back.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from kelvin.contracts.errors import Conflict, Refused


class VersionState(StrEnum):
    """State of a version."""

    ABSENT = "absent"
    READY = "ready"
    FAULTY = "faulty"
    DELETED = "deleted"


class VersionEvent(StrEnum):
    """Events of a version's life."""

    PUBLISHED = "published"
    RESTORED = "restored"
    FOUND_BROKEN = "found_broken"
    DELETED = "deleted"


class IllegalVersionEvent(ValueError):
    """The event can't happen in that state. The state is unchanged."""


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

# Restore failures that mean damaged bytes of the version. All others are about the machine.
_VERSION_FAULT_CODES: Final = frozenset(
    {
        "attestation_invalid", "chunk_corrupt", "chunk_missing", "manifest_corrupt", "manifest_missing",
        "pack_corrupt", "probe_failed",
    }
)  # fmt: skip


def next_state(state: VersionState, event: VersionEvent) -> VersionState:
    """Return the state after the event. Raises IllegalVersionEvent."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalVersionEvent(f"a version that is {state} can't be {event}") from None


def check_unused(model: str, aliases: Sequence[str], running: int) -> None:
    """Check that a model to be deleted has no alias and no running version. Raises Refused(Conflict)."""
    in_the_way = [f"the alias '{alias}' names a version of it" for alias in sorted(aliases)]
    if running:
        in_the_way.append(f"replicas run {running} of its versions")
    if in_the_way:
        raise Refused(
            Conflict(f"model '{model}'", f"{' and '.join(in_the_way)}; with `force` it is deleted all the same")
        )


def is_version_fault(code: str) -> bool:
    """Return whether a failure with this code means that the version itself is damaged."""
    return code in _VERSION_FAULT_CODES
