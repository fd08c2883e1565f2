"""The processes of an installation, as its operator's process table shows them. Any of them may end meanwhile."""

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
