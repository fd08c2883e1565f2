"""What a program of ours that the command line runs says of its work:
`kelvin/cli/operations/recovery_commands.py` reads it.
"""

import sys
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

from controlplane.db.database import failure_of
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import encode


def run_cli_program(work: Callable[[], object], *refusals: type[Exception]) -> int:
    """Do it. Its report, if it has one, as JSON on standard output and 0; or what is refused, as one line on standard
    error, and 1. What a database reports, such as a full disk, is refused; a defect is raised.
    """
    refused_by: tuple[type[Exception], ...] = (*refusals, OSError)
    try:
        report = work()
    except Refused as refused:
        said = refused.failure.message
    except DBAPIError as error:
        if (failure := failure_of(error)) is None:
            raise
        said = failure.message
    except refused_by as error:
        said = str(error)
    else:
        if report is not None:
            sys.stdout.write(encode(report).decode() + "\n")
        return 0
    sys.stderr.write(f"{said}\n")
    return 1
