"""The processes of an installation, as the process table shows them. Any of them may end meanwhile."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from coldstart_bench.harness.installation import Installation, KelvinUpProcess, free_port

# For programs of the tests. `kelvin` and its children import nothing from the current directory.
IMPORTS_TESTS = {"PYTHONPATH": str(Path(__file__).parents[2])}


def command(process: psutil.Process) -> list[str]:
    """Return its arguments; [] if it has ended."""
    try:
        return process.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return []


def refused_start(
    data: Path, settings: Mapping[str, str] | None = None, *, port: int | None = None, options: Sequence[str] = ()
) -> str:
    """Return the output of a `kelvin up` that never becomes ready and exits with 1."""
    with KelvinUpProcess(data, port or free_port(), settings, options=options) as process:
        assert (process.ready_line(), process.wait_exit()) == ("", 1), process.error_output()
        return process.error_output()


@contextlib.contextmanager
def service(log: Path, settings: Mapping[str, str], *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `python -m` with these arguments, as a service on its own host. Kills it at the end."""
    with log.open("ab") as said:
        process = subprocess.Popen([sys.executable, "-m", *words], env={**os.environ, **settings}, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def supervisor(installation: Installation) -> psutil.Process:
    """Return the process of `kelvin up`."""
    return psutil.Process(installation.pid)


def services(installation: Installation) -> dict[str, psutil.Process]:
    """Return the running services by module."""
    named = [(command(process), process) for process in supervisor(installation).children()]
    return {words[3]: process for words, process in named if len(words) == 4}


def mapped(installation: Installation, library: str) -> dict[str, bool]:
    """Return for each running service whether the library is mapped in its memory."""
    found = {}
    for module, process in services(installation).items():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[module] = any(library in row.path for row in process.memory_maps())
    return found
