"""May a version be started with what is signed about it? Pure: signatures were verified, roots were read by others."""

from collections.abc import Callable, Sequence
from enum import StrEnum

from kelvin.contracts.artifacts.attestation import SealRecord, shorten_key_id
from kelvin.contracts.artifacts.runtime_control import SealAttestation


class VerificationPolicy(StrEnum):
    """What happens to a version that no trust root signed."""

    REQUIRE = "require"  # it is not started
    WARN = "warn"  # it is started, logged and counted
    OFF = "off"  # nobody looks


def find_distrust(signers: Sequence[str], is_root: Callable[[str], bool]) -> str | None:
    """Why nothing vouches for where the version comes from, of the keys that signed; None where a root did."""
    if any(is_root(key_id) for key_id in signers):
        return None
    if signers:
        return f"{', '.join(shorten_key_id(key_id) for key_id in signers[:3])} signed it, which is no trust root here"
    return "nobody signed it"


def usable_seals(
    policy: VerificationPolicy, seals: Sequence[SealRecord], name_of: Callable[[str], str | None]
) -> tuple[SealAttestation, ...]:
    """Known answers to go by. With `require` only those of a trusted key: without any, a replica records its own."""
    return tuple(
        sealed.seal
        for sealed in seals
        if policy is not VerificationPolicy.REQUIRE
        or (sealed.key_id is not None and name_of(sealed.key_id) is not None)
    )
