"""Each error code of a database is classified: retryable, unknown, full, refused, damaged or a defect."""

import sqlite3

import pytest
from psycopg import errors

from controlplane.db.database_fault_policy import DatabaseFault, fault_of_result, fault_of_sqlstate

SQLSTATES = {
    errors.ConnectionException: DatabaseFault.UNKNOWN,
    errors.ConnectionFailure: DatabaseFault.UNKNOWN,
    errors.TransactionResolutionUnknown: DatabaseFault.UNKNOWN,
    errors.SqlclientUnableToEstablishSqlconnection: DatabaseFault.RETRYABLE,
    errors.ReadOnlySqlTransaction: DatabaseFault.RETRYABLE,
    errors.IdleInTransactionSessionTimeout: DatabaseFault.RETRYABLE,
    errors.NoActiveSqlTransaction: DatabaseFault.DEFECT,
    errors.InFailedSqlTransaction: DatabaseFault.DEFECT,
    errors.InvalidPassword: DatabaseFault.REFUSED,
    errors.InvalidCatalogName: DatabaseFault.REFUSED,
    errors.SerializationFailure: DatabaseFault.RETRYABLE,
    errors.DeadlockDetected: DatabaseFault.RETRYABLE,
    errors.StatementCompletionUnknown: DatabaseFault.UNKNOWN,
    errors.InsufficientPrivilege: DatabaseFault.REFUSED,
    errors.DiskFull: DatabaseFault.FULL,
    errors.OutOfMemory: DatabaseFault.RETRYABLE,
    errors.TooManyConnections: DatabaseFault.RETRYABLE,
    errors.ObjectInUse: DatabaseFault.RETRYABLE,
    errors.LockNotAvailable: DatabaseFault.RETRYABLE,
    errors.CantChangeRuntimeParam: DatabaseFault.DEFECT,
    errors.QueryCanceled: DatabaseFault.RETRYABLE,
    errors.AdminShutdown: DatabaseFault.UNKNOWN,
    errors.CrashShutdown: DatabaseFault.UNKNOWN,
    errors.CannotConnectNow: DatabaseFault.RETRYABLE,
    errors.IdleSessionTimeout: DatabaseFault.RETRYABLE,
    errors.IoError: DatabaseFault.RETRYABLE,
    errors.UndefinedFile: DatabaseFault.RETRYABLE,
    errors.DataCorrupted: DatabaseFault.DAMAGED,
    errors.IndexCorrupted: DatabaseFault.DAMAGED,
    errors.InternalError_: DatabaseFault.DEFECT,
    errors.SyntaxError: DatabaseFault.DEFECT,
    errors.UndefinedTable: DatabaseFault.DEFECT,
    errors.UniqueViolation: DatabaseFault.DEFECT,
    errors.InvalidParameterValue: DatabaseFault.DEFECT,
}

RESULTS = {
    sqlite3.SQLITE_BUSY: DatabaseFault.RETRYABLE,
    sqlite3.SQLITE_BUSY_SNAPSHOT: DatabaseFault.RETRYABLE,
    sqlite3.SQLITE_LOCKED: DatabaseFault.RETRYABLE,
    sqlite3.SQLITE_IOERR: DatabaseFault.RETRYABLE,
    sqlite3.SQLITE_IOERR_FSYNC: DatabaseFault.RETRYABLE,
    sqlite3.SQLITE_IOERR_SHMSIZE: DatabaseFault.FULL,
    sqlite3.SQLITE_CANTOPEN: DatabaseFault.RETRYABLE,
    sqlite3.SQLITE_FULL: DatabaseFault.FULL,
    sqlite3.SQLITE_READONLY: DatabaseFault.REFUSED,
    sqlite3.SQLITE_READONLY_DIRECTORY: DatabaseFault.REFUSED,
    sqlite3.SQLITE_CORRUPT: DatabaseFault.DAMAGED,
    sqlite3.SQLITE_CORRUPT_INDEX: DatabaseFault.DAMAGED,
    sqlite3.SQLITE_NOTADB: DatabaseFault.DAMAGED,
    sqlite3.SQLITE_ERROR: DatabaseFault.DEFECT,
    sqlite3.SQLITE_CONSTRAINT: DatabaseFault.DEFECT,
    sqlite3.SQLITE_MISUSE: DatabaseFault.DEFECT,
    0: DatabaseFault.DEFECT,  # text that does not decode fails in the driver, without a code
}


@pytest.mark.parametrize(("error", "fault"), [pytest.param(*each, id=each[0].__name__) for each in SQLSTATES.items()])
def test_sqlstate_has_its_fault(error: type[errors.Error], fault: DatabaseFault) -> None:
    """The longest prefix in the table decides."""
    assert error.sqlstate is not None
    assert fault_of_sqlstate(error.sqlstate) is fault


def test_codes_of_other_servers_are_classified() -> None:
    """A code that PostgreSQL 17 added follows the table. A code of an unknown class is a defect."""
    assert fault_of_sqlstate("25P04") is DatabaseFault.RETRYABLE  # transaction_timeout
    assert fault_of_sqlstate("57XXX") is DatabaseFault.RETRYABLE
    assert fault_of_sqlstate("P0001") is DatabaseFault.DEFECT
    assert fault_of_sqlstate("") is DatabaseFault.DEFECT


@pytest.mark.parametrize(("code", "fault"), RESULTS.items())
def test_result_code_has_its_fault(code: int, fault: DatabaseFault) -> None:
    """An extended code that is not in the table follows its low byte."""
    assert fault_of_result(code) is fault
