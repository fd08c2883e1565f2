"""The name under which a version is throttled, reported and woken."""

from typing import NamedTuple


class VersionKey(NamedTuple):
    """One version of one tenant's model."""

    tenant: str
    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.model}@{self.version[:12]}"
