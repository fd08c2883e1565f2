"""The processes of an installation, as its operator's process table shows them. Any of them may end meanwhile."""

import contextlib

import psutil

from coldstart_bench.installation import Installation


def command(process: psutil.Process) -> list[str]:
    """Its words; none where it has ended."""
    try:
        return process.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return []


def supervisor(installation: Installation) -> psutil.Process:
    """The `kelvin up` of this test's process."""
    (found,) = [p for p in psutil.Process().children() if {"up", str(installation.data)} <= set(command(p))]
    return found


def services(installation: Installation) -> dict[str, psutil.Process]:
    """The services that live, by module."""
    named = [(command(process), process) for process in supervisor(installation).children()]
    return {words[2]: process for words, process in named if len(words) == 3}


def mapped(installation: Installation, library: str) -> dict[str, bool]:
    """The services that live, by module: whether a file of that name is in their memory."""
    found = {}
    for module, process in services(installation).items():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[module] = any(library in row.path for row in process.memory_maps())
    return found
