"""Decide whether a version may start with its attestations. Pure: callers verify signatures and read roots."""

from collections.abc import Callable, Sequence
from enum import StrEnum

from kelvin.contracts.artifacts.attestation import SealRecord, shorten_key_id
from kelvin.contracts.artifacts.runtime_control import SealAttestation


class VerificationPolicy(StrEnum):
    """The treatment of a version that no trust root signed."""

    REQUIRE = "require"  # it does not start
    WARN = "warn"  # it starts, and that is logged and counted
    OFF = "off"  # it starts: signatures are checked, but not whether a trust root signed


def find_distrust(signers: Sequence[str], is_root: Callable[[str], bool]) -> str | None:
    """Return why no trust root vouches for the version, or None if one signed it. `signers` are key ids."""
    if any(is_root(key_id) for key_id in signers):
        return None
    if signers:
        return f"{', '.join(shorten_key_id(key_id) for key_id in signers[:3])} signed it, which is no trust root here"
    return "it has no valid signature"


def usable_seals(
    policy: VerificationPolicy, seals: Sequence[SealRecord], name_of: Callable[[str], str | None]
) -> tuple[SealAttestation, ...]:
    """Return the seals whose known answers may be used. With `require`, only those of a trusted key. Without any usable
    seal, a replica records its own known answers.
    """
    return tuple(
        sealed.seal
        for sealed in seals
        if policy is not VerificationPolicy.REQUIRE
        or (sealed.key_id is not None and name_of(sealed.key_id) is not None)
    )
