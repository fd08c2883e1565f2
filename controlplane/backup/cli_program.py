"""Run a program of ours for the command line. `kelvin/cli/operations/recovery_commands.py` reads its output."""

import sys
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

from controlplane.db.database import failure_of
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import encode


def run_cli_program(work: Callable[[], object], *refusals: type[Exception]) -> int:
    """Run `work`. Write its report, if any, as JSON to standard output, and return 0. For a refusal write one line to
    standard error, and return 1.

    Refused, `refusals`, OSError and database errors such as a full disk are refusals. A defect is raised.
    """
    refused_by: tuple[type[Exception], ...] = (*refusals, OSError)
    try:
        report = work()
    except Refused as refused:
        message = refused.failure.message
    except DBAPIError as error:
        if (failure := failure_of(error)) is None:
            raise
        message = failure.message
    except refused_by as error:
        message = str(error)
    else:
        if report is not None:
            sys.stdout.write(encode(report).decode() + "\n")
        return 0
    sys.stderr.write(f"{message}\n")
    return 1
