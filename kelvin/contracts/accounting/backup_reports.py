"""What a backup says of itself, and what a restore did. The bytes around a backup are
`controlplane/backup/archive.py`'s.
"""

from typing import Final

from kelvin.contracts.accounting.audit_reports import AuditChain
from kelvin.contracts.wire import Wire

BACKUP_FORMAT: Final = 1
SUFFIX: Final = ".backup"


class BackupMember(Wire, frozen=True):
    """A file of the archive."""

    name: str
    size: int  # bytes
    sha256: str


class BackupVersion(Wire, frozen=True):
    """A version that the registry names. Its bytes are in the store, not in the backup."""

    tenant: str
    model: str
    version: str  # the digest of its manifest
    total_bytes: int


class BackupIndex(Wire, frozen=True):
    """`index.json`, the last but one member: what came before it, and from where the journal goes on."""

    format: int
    made_at_us: int  # wall clock, microseconds since 1970; all that was durable then is in it
    program: str  # the version of Kelvin that made it
    journal_after: int | None  # entries of the ledger's journal up to this one are in the database; None: it has none
    members: tuple[BackupMember, ...]
    versions: tuple[BackupVersion, ...]


class RestoredChain(Wire, frozen=True):
    """A tenant's month, recomputed from the rows after everything was put in."""

    tenant: str
    month: str
    links: int
    chain: str
    difference: str | None = None  # the first row that is not what was written


class RestoreReport(Wire, frozen=True):
    """What a restore found, and what it put in place."""

    source: str  # the file that was taken
    passed_over: tuple[str, ...]  # newer ones that can't be used, and why
    made_at_us: int
    unshipped: int  # records of the backup's spools that were entered
    replayed: int  # entries of the journal that were entered
    missing: int | None  # entries that the journal should have and has not; None: it is gone, nobody knows
    chains: tuple[RestoredChain, ...]
    keys: int
    versions: tuple[BackupVersion, ...]
    placed: tuple[str, ...]  # names in the data directory; none where it was only checked
    aside: str | None  # where what was there before is kept
    took_us: int
    audits: tuple[AuditChain, ...] = ()
    database: str | None = None  # into which it was restored, as it was named; None: a data directory, or only checked
    unreadable: int = 0  # records of the backup's spools that this program can't read, and that were left out

    @property
    def sound(self) -> bool:
        """Whether every chain holds."""
        differences = [*(each.difference for each in self.chains), *(each.difference for each in self.audits)]
        return all(each is None for each in differences)
