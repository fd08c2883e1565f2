"""`kelvin runtime` as a kubelet sees it: command line, port, probes, signals and exit status. Real processes."""

import contextlib
import http.client
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from kelvin.contracts.serving.stream_frames import FrameDecoder, FrameKind
from kelvin.supervisor.exit_recorder import read_recorded_runtimes
from tests.kelvin.pods import PROMPT, pod, was_probed
from tests.runtime.processes import DEADLINE_S, Installation, poll_until
from tests.unclean_exit import find_unclean_exit
from tests.weightcache.kit import Version


def text_of(raw: bytes) -> str:
    frames = FrameDecoder().feed(raw)
    assert frames[-1].kind is FrameKind.END
    return str(
        json.loads(b"".join(frame.payload for frame in frames if frame.kind is FrameKind.DATA))["choices"][0]["text"]
    )


def test_pod_serves_drains_and_ends(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """A ready pod gives the right completion and has no control routes. A drain finishes running requests."""
    house, version = sealed
    with pod(house, version.id, tmp_path / "data", "--threads", "1") as each:
        poll_until("it is ready", each.is_ready)
        report = json.loads(each.get("/readyz")[1])
        assert (report["state"], report["version"], report["device_class"]) == ("ready", version.id, "cpu-1")
        assert [span["stage"] for span in report["spans"]] == ["leased", "bound", "ready"]
        assert each.get("/healthz") == (200, b"")
        assert each.get("/healthz", {"K-Network-Probe": "queue"}) == (200, b"queue")
        assert each.get("/healthz", {"K-Network-Probe": "other"})[0] == 400
        assert b"kelvin_kv_blocks" in each.get("/metrics")[1]
        assert each.get("/control/state")[0] == 404
        forked = house.fork()
        forked.bind(version)
        right = forked.answer(PROMPT)
        status, raw = each.ask(PROMPT)
        assert status == 200
        assert (
            text_of(raw)
            == json.loads(b"".join(f.payload for f in right if f.kind is FrameKind.DATA))["choices"][0]["text"]
        )

        os.kill(each.child("weightcache"), signal.SIGKILL)
        assert each.ask(PROMPT)[0] == 200, "what is mapped stays"

        connection, answer = each.open(PROMPT | {"max_tokens": 200, "stream": True})
        first = answer.read(1)
        each.process.send_signal(signal.SIGTERM)
        frames = FrameDecoder().feed(first + answer.read())
        connection.close()
        assert frames[-1].kind is FrameKind.END
        assert frames[-1].counts.completion_tokens == 200
        assert each.process.wait(DEADLINE_S) == 0
        (life,) = read_recorded_runtimes(each.data / "spool")
        assert life == report["runtime_id"]
    assert not list((tmp_path / "data" / "run" / "meters").iterdir())


@pytest.mark.deep
def test_hung_cache_agent_is_replaced(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """The kubelet doesn't probe the cache agent. Meanwhile the runtime serves requests."""
    house, version = sealed
    with pod(house, version.id, tmp_path / "data", "--threads", "1") as each:
        poll_until("it is ready", each.is_ready)
        hung, runtime = each.child("weightcache"), each.child("runtime.app.pod")
        poll_until("the watchdog has probed it", lambda: was_probed(hung) or None)
        os.kill(hung, signal.SIGSTOP)
        poll_until("another one", lambda: each.find_child("weightcache") not in (None, hung) or None)
        assert each.child("runtime.app.pod") == runtime
        assert each.ask(PROMPT)[0] == 200


@pytest.mark.parametrize(
    "ended_by",
    [
        signal.SIGINT,
        signal.SIGHUP,
        pytest.param(signal.SIGKILL, id="its processes, whose supervisor is lost"),
    ],
)
def test_end_under_a_request_leaves_no_traceback(
    sealed: tuple[Installation, Version], tmp_path: Path, ended_by: signal.Signals
) -> None:
    """No process logs more than a line, whatever ends the pod. `pod` checks the log."""
    house, version = sealed
    with pod(house, version.id, tmp_path / "data", "--threads", "1") as each:
        poll_until("it is ready", each.is_ready)
        connection, answer = each.open(PROMPT | {"max_tokens": 200, "stream": True})
        assert answer.read(1)
        each.process.send_signal(ended_by)
        with contextlib.suppress(OSError, http.client.HTTPException):  # the stream is cut if the supervisor is lost
            answer.read()
        connection.close()
        assert each.process.wait(DEADLINE_S) == (-ended_by if ended_by is signal.SIGKILL else 0)
        if ended_by is signal.SIGKILL:
            _, lines = each.process.communicate(timeout=DEADLINE_S)  # waits until its last process has ended
            assert find_unclean_exit(lines.decode()) == []


def test_missing_version_ends_the_pod_with_1(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """Exit status 1, with the reason in the log."""
    house, _ = sealed
    with pod(house, "0" * 64, tmp_path / "data") as each:
        _, lines = each.process.communicate(timeout=DEADLINE_S)
        assert each.process.returncode == 1
    failed = [json.loads(line) for line in lines.splitlines() if b'"failed"' in line]
    assert failed[0]["why"] == f"the manifest of version {'0' * 64} is missing in the store: run 'kelvin fsck'"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_device_ends_the_pod_with_2(sealed: tuple[Installation, Version], tmp_path: Path) -> None:
    """Exit status 2 before anything is restored, with class and rule in the log. The test above is the control."""
    house, version = sealed
    with pod(house, version.id, tmp_path / "data", "--device-class", "h100") as each:
        _, lines = each.process.communicate(timeout=DEADLINE_S)
        assert each.process.returncode == 2
    (log_line,) = (json.loads(line) for line in lines.splitlines() if b'"no device"' in line)
    assert log_line["device_class"] == "h100"
    assert "begins with cpu-" in log_line["why"]


@pytest.mark.parametrize(
    ("version", "options", "words"),
    [
        ("12ab", (), b"'12ab': must be 64 lowercase hexadecimal digits"),
        ("0" * 64, ("--model", "No_Label"), b"model='No_Label': must be a DNS label"),
    ],
)
def test_bad_arguments(
    sealed: tuple[Installation, Version], tmp_path: Path, version: str, options: tuple[str, ...], words: bytes
) -> None:
    """Exit status 2, as for all wrong usage, with value and rule."""
    house, _ = sealed
    with pod(house, version, tmp_path / "data", *options) as each:
        _, lines = each.process.communicate(timeout=DEADLINE_S)
        assert each.process.returncode == 2
    assert words in lines
