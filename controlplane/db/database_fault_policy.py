"""Classify a database's errors, by SQLSTATE for PostgreSQL and by result code for SQLite.

Sources: PostgreSQL, appendix A, "Error Codes"; SQLite, "Result and Error Codes".
"""

from enum import Enum, auto
from typing import Final


class DatabaseFault(Enum):
    """The result of a failed transaction, and what can be done about it."""

    RETRYABLE = auto()  # nothing was committed, and the same may succeed later
    UNKNOWN = auto()  # the session ended: a commit in progress may or may not have taken place
    FULL = auto()  # nothing was committed: there is no room on the disk
    REFUSED = auto()  # nothing was committed: the database denies access until an operator changes that
    DAMAGED = auto()  # nothing was committed: the database's own files are damaged
    DEFECT = auto()  # nothing was committed: the statement is wrong, a defect of Kelvin


# The longest prefix that is listed here decides. The first two characters of a code are its class.
_BY_SQLSTATE: Final = {
    "08": DatabaseFault.UNKNOWN,  # connection exception
    "08001": DatabaseFault.RETRYABLE,  # no connection was made
    "08004": DatabaseFault.RETRYABLE,  # the server rejected the connection
    "25006": DatabaseFault.RETRYABLE,  # read-only transaction: the server is a standby
    "25P03": DatabaseFault.RETRYABLE,  # idle_in_transaction_session_timeout, which ends the session
    "25P04": DatabaseFault.RETRYABLE,  # transaction_timeout, which ends the session
    "28": DatabaseFault.REFUSED,  # invalid authorization
    "3D": DatabaseFault.REFUSED,  # there is no such database
    "40": DatabaseFault.RETRYABLE,  # rolled back: serialization failure, deadlock
    "40002": DatabaseFault.DEFECT,  # rolled back: a constraint is violated
    "40003": DatabaseFault.UNKNOWN,  # statement completion unknown
    "42501": DatabaseFault.REFUSED,  # insufficient privilege
    "53": DatabaseFault.RETRYABLE,  # insufficient resources: memory, connections
    "53100": DatabaseFault.FULL,
    "55": DatabaseFault.RETRYABLE,  # not in the state that it takes: a lock, an object in use, a recovery
    "55P02": DatabaseFault.DEFECT,  # a parameter that can't be changed now
    "55P04": DatabaseFault.DEFECT,  # a new enum value used too early
    "57": DatabaseFault.RETRYABLE,  # operator intervention: a statement was cancelled, the server can't connect now
    "57P01": DatabaseFault.UNKNOWN,  # the session was ended; a commit may have been waiting for its standby
    "57P02": DatabaseFault.UNKNOWN,  # the server crashed
    "58": DatabaseFault.RETRYABLE,  # system error: input or output
    "XX001": DatabaseFault.DAMAGED,
    "XX002": DatabaseFault.DAMAGED,
}

# SQLite's result codes. An extended code that is not listed has the fault of its primary code, the low byte.
_BY_RESULT: Final = {
    3: DatabaseFault.REFUSED,  # PERM
    5: DatabaseFault.RETRYABLE,  # BUSY
    6: DatabaseFault.RETRYABLE,  # LOCKED
    7: DatabaseFault.RETRYABLE,  # NOMEM
    8: DatabaseFault.REFUSED,  # READONLY
    9: DatabaseFault.RETRYABLE,  # INTERRUPT
    10: DatabaseFault.RETRYABLE,  # IOERR
    11: DatabaseFault.DAMAGED,  # CORRUPT
    13: DatabaseFault.FULL,  # FULL
    14: DatabaseFault.RETRYABLE,  # CANTOPEN: no file descriptors, or the directory is away
    15: DatabaseFault.RETRYABLE,  # PROTOCOL: too many processes wait for the lock of the log
    23: DatabaseFault.REFUSED,  # AUTH
    26: DatabaseFault.DAMAGED,  # NOTADB
    4874: DatabaseFault.FULL,  # IOERR_SHMSIZE: the index of the log can't grow
}


def fault_of_sqlstate(code: str) -> DatabaseFault:
    """Return the fault of a five-character code of PostgreSQL."""
    for length in range(len(code), 1, -1):
        if (found := _BY_SQLSTATE.get(code[:length])) is not None:
            return found
    return DatabaseFault.DEFECT


def fault_of_result(code: int) -> DatabaseFault:
    """Return the fault of a result code of SQLite, primary or extended."""
    return _BY_RESULT.get(code, _BY_RESULT.get(code & 0xFF, DatabaseFault.DEFECT))
