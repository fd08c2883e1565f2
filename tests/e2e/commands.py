"""Run commands as a user types them, but in this process: imports would take half a second per process.

`Installation.push` and some tests run them as processes.
"""

import io
from contextlib import redirect_stderr, redirect_stdout

from coldstart_bench.harness.installation import Installation
from kelvin.cli.main import main


def run(kelvin: Installation, *words: str, code: int = 0, errors: bool | None = None) -> str:
    """Return the command's standard output, or its standard error if it fails. Its exit code must be `code`."""
    status, out, err = run_to_end(*words, "--data", str(kelvin.data))
    assert status == code, f"{out}\n{err}"
    return err if (code != 0 if errors is None else errors) else out


def run_to_end(*words: str) -> tuple[int, str, str]:
    """Run `kelvin` with these arguments. Return exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main.main(list(words), prog_name="kelvin")
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return status, out.getvalue(), err.getvalue()
