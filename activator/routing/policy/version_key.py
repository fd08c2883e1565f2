"""The key of a version in queues, reports and wake calls."""

from typing import NamedTuple, Protocol


class VersionKey(NamedTuple):
    """One version of one tenant's model."""

    tenant: str
    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.model}@{self.version[:12]}"


class NamesVersion(Protocol):
    """A row, a stat or a forecast that names its version."""

    @property
    def tenant(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def version(self) -> str: ...


def key_of(row: NamesVersion) -> VersionKey:
    """Return the key of the version that `row` is about."""
    return VersionKey(row.tenant, row.model, row.version)
