"""`kelvin up`: log lines and errors while it waits for its processes."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.supervisor import installation_supervisor as subject
from kelvin.supervisor.exit_recorder import open_exit_recorder
from kelvin.supervisor.installation_supervisor import NotReady, Supervisor, activator_url
from kelvin.supervisor.restart_policy import Restarts
from kelvin.supervisor.settings import UpSettings
from tests.controlplane.machine_fixture import ROOT


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """A supervisor whose processes were not started."""
    (tmp_path / "logs").mkdir()
    settings = UpSettings(data=tmp_path, port=8443, host="localhost", ready_s=0, drain_s=1)
    with closing(SocketDirectory(tmp_path / "run")) as directory, open_exit_recorder(tmp_path) as (recorder, _):
        yield Supervisor(settings, directory, recorder, -1, None)


@pytest.mark.parametrize("deaths", [pytest.param(0, id="too slow"), pytest.param(9, id="dies again and again")])
async def test_start_that_fails_on_a_full_disk_names_the_disk(
    supervisor: Supervisor, deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process's log has no space for the reason, so the error names the full disk."""

    def allocate(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    supervisor.group.members[1].restarts = Restarts(deaths)
    with pytest.raises(NotReady):
        await supervisor.wait_ready()
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(OSError, match="No space left on device") as caught:
        await supervisor.wait_ready()
    assert Path(caught.value.filename).parent == tmp_path / "logs"


async def test_slow_start_names_the_missing_process(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else is logged before the installation is ready."""
    monkeypatch.setattr(subject, "WAIT_LOG_S", 0.0)
    with caplog.at_level(logging.INFO), pytest.raises(NotReady):
        await supervisor.wait_ready()
    assert [(record.message, record.__dict__["waiting_for"]) for record in caplog.records] == [
        ("not ready yet", "zygote")
    ]


@pytest.mark.parametrize(
    ("host", "want"),
    [
        pytest.param("127.0.0.1", "https://localhost:8443", id="the default"),
        pytest.param("0.0.0.0", "https://localhost:8443", id="every address"),
        pytest.param("::", "https://localhost:8443", id="every address of version 6"),
        pytest.param("::0", "https://localhost:8443", id="the same in another form"),
        pytest.param("127.0.0.2", "https://127.0.0.2:8443", id="another address"),
        pytest.param("fd00::1", "https://[fd00::1]:8443", id="another address of version 6"),
        pytest.param("door.example", "https://door.example:8443", id="a name"),
    ],
)
def test_ready_line_names_an_address_that_is_listened_at(host: str, want: str) -> None:
    """Commands on this machine read this address too."""
    assert activator_url(host, 8443) == want


START = """
import asyncio, pathlib, subprocess, sys
from kelvin.supervisor.settings import UpSettings
from kelvin.supervisor import child_group as children, installation_supervisor as up

def start(child, *_):
    if child.spec.listens:
        raise OSError(28, "No space left on device", "activator.log")
    child.process = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)

children.Child.start = start
try:
    asyncio.run(up.supervise(UpSettings(pathlib.Path(sys.argv[1]), 8443, "localhost", 60, 1)))
except OSError as error:
    print(error.filename, len(children.children()))
"""


def test_start_that_the_system_refuses_leaves_no_process(tmp_path: Path) -> None:
    """Processes started before the refused one are ended."""
    command = [sys.executable, "-c", START, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "activator.log 0\n"
