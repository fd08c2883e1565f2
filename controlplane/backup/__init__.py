"""Back up an installation on a schedule, and restore one from a backup and the ledger's journal.

The journal is `ledger/ledger_journal.py`. PostgreSQL is backed up by its own tools, not here. Begin with `backups.py`
and `restore_program.py`; both are also programs.
"""
