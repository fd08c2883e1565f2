"""Commands as a user types them, without a process for each: half a second of one is what it imports.

As processes they are run by `Installation.push`, and where a test says so.
"""

import io
from contextlib import redirect_stderr, redirect_stdout

from coldstart_bench.harness.installation import Installation
from kelvin.cli.main import main


def run(kelvin: Installation, *words: str, code: int = 0, errors: bool | None = None) -> str:
    """The command's standard output, of a failure its standard error; its exit code must be `code`."""
    status, out, err = run_to_end(*words, "--data", str(kelvin.data))
    assert status == code, f"{out}\n{err}"
    return err if (code != 0 if errors is None else errors) else out


def run_to_end(*words: str) -> tuple[int, str, str]:
    """`kelvin` with these words: its exit code and both outputs. Raises what nobody turned into a sentence."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main.main(list(words), prog_name="kelvin")
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return status, out.getvalue(), err.getvalue()
