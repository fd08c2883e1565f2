"""A service process: how it starts, and what ends it."""

import os
import resource
import signal
import subprocess
import sys
from subprocess import PIPE

import pytest

REPORT = (
    "import gc; from kelvin.process.service_lifecycle import run_service\n"
    "async def main(stop): print(gc.get_freeze_count())\n"
)


@pytest.mark.parametrize(
    ("call", "frozen"),
    [
        pytest.param("run_service(main, None)", True, id="a service"),
        pytest.param("import asyncio; asyncio.run(main(None))", False, id="a loop on its own"),
    ],
)
def test_a_service_has_frozen_what_it_imported(call: str, frozen: bool) -> None:
    """Imported objects are frozen, so a full garbage collection skips them."""
    done = subprocess.run([sys.executable, "-c", REPORT + call], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 10_000) == frozen


RAISES = """
import resource
from kelvin.process.startup import raise_descriptor_limit

raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_soft_limit_of_descriptors_becomes_the_hard_one() -> None:
    """The hard limit is unchanged."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run(
        [sys.executable, "-c", RAISES],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard)),
        stdout=PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(hard)] * 2


UNTIL_STOPPED = """
import asyncio, signal, sys
from kelvin.process.service_lifecycle import run_service

async def main(stop):
    print("up", flush=True)
    await stop.wait()
    print("drained", flush=True)

run_service(main, None)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_begins_a_drain(number: signal.Signals) -> None:
    """A hangup, as of a dropped ssh session, drains a process as SIGTERM does."""
    with subprocess.Popen([sys.executable, "-c", UNTIL_STOPPED], stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.stdout.read() == "drained\n"
    assert process.returncode == 0


ANSWERS = "    asyncio.get_running_loop().add_reader(0, lambda: print(sys.stdin.readline(), end=''))\n"
ECHO = UNTIL_STOPPED.replace("    await stop", ANSWERS + "    await stop")


def test_nohup_keeps_a_process_that_loses_its_terminal() -> None:
    """SIGHUP stays ignored if it was ignored at the start."""
    command = ["nohup", sys.executable, "-uc", ECHO]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGHUP)
        for word in ("first\n", "second\n"):  # a draining process might still reply to one of them
            process.stdin.write(word)
            assert process.stdout.readline() == word
        process.terminate()
        assert process.stdout.read() == "drained\n"
    assert process.returncode == 0


ON_A_LIFELINE = """
import asyncio, sys
from kelvin.process.service_lifecycle import run_service

async def main(stop):
    print("up", flush=True)
    await stop.wait()
    if sys.argv[2] == "hang":
        await asyncio.Event().wait()

run_service(main, int(sys.argv[1]))
"""


@pytest.mark.parametrize(("behaviour", "status"), [("end", 0), ("hang", 1)])
def test_end_of_the_supervisor_ends_the_service(behaviour: str, status: int) -> None:
    """The process ends when its lifeline closes, even if it hangs in its drain."""
    read, write = os.pipe()
    command = [sys.executable, "-c", ON_A_LIFELINE, str(read), behaviour]
    with subprocess.Popen(command, stdout=PIPE, text=True, pass_fds=(read,)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.close(read)
        os.close(write)
        process.communicate(timeout=60)
        assert process.returncode == status
