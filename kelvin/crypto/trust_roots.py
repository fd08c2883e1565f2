"""Which signatures are trusted: those of trust roots, which an operator installs, and of the installation's own key."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from kelvin.contracts.artifacts.attestation import SUPPORTED_KEYS, key_id_of
from kelvin.contracts.setting_parser import BadSetting

SECRET_FILE: Final = "attest.key"
PUBLIC_FILE: Final = "attest.pub"
ROOTS: Final = "trust"
INSTALLATION: Final = "installation"


@dataclass(slots=True)
class Trust:
    """The trusted keys. `roots` maps key ids to names. The installation's own key may be created after this process
    began, so its file is checked until it exists.
    """

    roots: Mapping[str, str] = field(default_factory=dict)
    own_file: Path | None = None
    _own: str | None = None

    def is_root(self, key_id: str) -> bool:
        """Return whether the key's statements about a version's origin are trusted."""
        return key_id in self.roots

    def name_of(self, key_id: str) -> str | None:
        """Return the trust root's name, or INSTALLATION for our own key; None if the key is not trusted. Our own key is
        trusted for seals. Only roots are trusted for a version's origin: see `is_root`.
        """
        return self.roots.get(key_id) or (INSTALLATION if key_id == self._own_key() else None)

    def _own_key(self) -> str | None:
        if self._own is None and self.own_file is not None:
            try:
                self._own = _key_id(self.own_file)
            except (OSError, ValueError):
                return None
        return self._own


def read_trust(data: Path, roots: Path) -> Trust:
    """Read the roots: the `*.pem` files of a directory, which may be missing. Raises BadSetting for an invalid key."""
    found: dict[str, str] = {}
    for path in sorted(roots.glob("*.pem")):
        try:
            found[_key_id(path)] = path.stem
        except (OSError, ValueError) as error:
            rule = f"{path.name} must hold a public key of {SUPPORTED_KEYS} in PEM"
            raise BadSetting("KELVIN_TRUST_ROOTS", str(roots), rule) from error
    return Trust(found, data / PUBLIC_FILE)


def _key_id(path: Path) -> str:
    try:
        return key_id_of(load_pem_public_key(path.read_bytes()))
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
