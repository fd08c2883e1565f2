"""The index of a backup, and the report of a restore. `controlplane/backup/archive.py` defines the archive's bytes."""

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
    """The content of `index.json`, the last member but one: the members before it, and where the journal continues."""

    format: int
    made_at_us: int  # wall clock, microseconds since 1970; the backup has all that was durable then
    program: str  # the version of Kelvin that made it
    # The database has the entries of the ledger's journal up to this one. None: it has no journal.
    journal_after: int | None
    members: tuple[BackupMember, ...]
    versions: tuple[BackupVersion, ...]


class RestoredChain(Wire, frozen=True):
    """The hash chain of a tenant's month, recomputed from the restored rows."""

    tenant: str
    month: str
    links: int
    chain: str
    difference: str | None = None  # the first row that was altered


class RestoreReport(Wire, frozen=True):
    """Findings and results of a restore."""

    source: str  # the backup file that was restored
    passed_over: tuple[str, ...]  # newer backups that can't be used, and why
    made_at_us: int
    unshipped: int  # records of the backup's spools that were added to the ledger
    replayed: int  # journal entries that were added to the ledger
    missing: int | None  # entries that the journal lacks; None: the journal is gone, so the number is unknown
    chains: tuple[RestoredChain, ...]
    keys: int
    versions: tuple[BackupVersion, ...]
    placed: tuple[str, ...]  # names in the data directory; empty if the backup was only checked
    aside: str | None  # where the previous data directory is kept
    took_us: int
    audits: tuple[AuditChain, ...] = ()
    # Name of the database that received the data. None: a data directory was restored, or the backup was only checked.
    database: str | None = None
    unreadable: int = 0  # records of the backup's spools that this program can't read; they were left out

    @property
    def sound(self) -> bool:
        """Return whether every chain is intact."""
        differences = [*(each.difference for each in self.chains), *(each.difference for each in self.audits)]
        return all(each is None for each in differences)
