"""The filter process, called as a replica calls it: results, refusals and restarts."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kelvin.contracts.artifacts.filter_api import CHECK_PATH, FILTERS_SOCKET, FilterRequest, FilterRule
from kelvin.contracts.errors import Refused
from kelvin.contracts.setting_parser import BadSetting
from kelvin.filters import settings
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from runtime.surface.filter_pipeline import FilterClient

DEADLINE_S = 30.0
EMAIL = FilterRule(filter="pii", actions={"EMAIL_ADDRESS": "redact"})
QUESTION = FilterRequest(direction="output", rules=(EMAIL,), texts=("to a@b.example now", "x" * 5000), whole=True)


def _start(data: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "KELVIN_DATA": str(data), "PYTHONPATH": os.pathsep.join(sys.path)}
    with (data / "log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "kelvin.filters"], env=env, stderr=log)


def _end(process: subprocess.Popen[bytes], number: int) -> int:
    process.send_signal(number)
    return process.wait(DEADLINE_S)


@asynccontextmanager
async def _client(data: Path) -> AsyncIterator[ServiceClient]:
    directory = SocketDirectory(data / "run")
    client = ServiceClient(directory, FILTERS_SOCKET, "the filters")
    try:
        yield client
    finally:
        await client.close()
        directory.close()


async def test_killed_filter_process_answers_after_restart(tmp_path: Path) -> None:
    """A request is repeated until its deadline, so neither a start nor a crash is visible to its caller. SIGTERM ends
    the process with 0."""
    process = _start(tmp_path)
    try:
        async with _client(tmp_path) as client:
            filters = FilterClient(client, asyncio.get_running_loop())
            found = await filters.check(QUESTION, DEADLINE_S)
            assert [(span.start, span.end) for span in found.looked[0].spans] == [(3, 14)]
            assert found.looked[1].spans == ()
            assert await asyncio.to_thread(filters.check_from_thread, QUESTION, DEADLINE_S) == found
            _end(process, signal.SIGKILL)
            with pytest.raises(Refused, match="unavailable"):  # the control: the process is down
                await filters.check(QUESTION, 0.05)
            filters.count_unfiltered(3)
            with pytest.raises(Refused, match="unavailable"):
                await filters.check(QUESTION, 0.05)
            process = _start(tmp_path)
            for _ in range(2):  # the unfiltered texts are reported once
                assert await filters.check(QUESTION, DEADLINE_S) == found
            async with client.open("GET", "/metrics", timeout_s=DEADLINE_S) as answer:
                assert 'kelvin_filter_unseen_total{process="filters"} 3\n' in await answer.text()
        assert _end(process, signal.SIGTERM) == 0
    finally:
        if process.poll() is None:
            _end(process, signal.SIGKILL)


async def test_unknown_rule_is_refused_and_verdicts_are_counted(tmp_path: Path) -> None:
    """An unknown entity or region is refused by name. The metrics have verdicts and entities but no text."""
    process = _start(tmp_path)
    try:
        async with _client(tmp_path) as client:
            filters = FilterClient(client, asyncio.get_running_loop())
            await filters.check(QUESTION, DEADLINE_S)
            for rule, quoted_value in (
                (FilterRule(filter="pii", actions={"NAME": "stop"}), "'NAME'"),
                (FilterRule(filter="pii", actions={}, phone_regions=("XX",)), "'XX'"),
            ):
                wrong = FilterRequest(direction="input", rules=(rule,), texts=("",), whole=True)
                with pytest.raises(Refused, match=quoted_value):
                    await filters.check(wrong, DEADLINE_S)
            async with client.open("GET", "/metrics", timeout_s=DEADLINE_S) as answer:
                page = await answer.text()
            for series in (
                'verdicts_total{%s,verdict="redact"} 1',
                'verdicts_total{%s,verdict="allow"} 1',
                'found_total{%s,entity="EMAIL_ADDRESS",action="redact"} 1',
            ):
                labels = 'process="filters",filter="pii",direction="output"'
                assert f"kelvin_filter_{series % labels}" in page
            assert "b.example" not in page
            async with client.session.post(f"http://filters{CHECK_PATH}", data=b"{") as refused:
                assert refused.status == 400
    finally:
        _end(process, signal.SIGKILL)
    assert "b.example" not in (tmp_path / "log").read_text()


def test_missing_extra_is_named_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the process refuses to start and says what to install."""
    assert settings.read_settings({"KELVIN_DATA": "/d"}).run == Path("/d/run")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadSetting, match=r"KELVIN_FILTERS=on: needs the extra: pip install kelvin-serving\[pii\]"):
        settings.read_settings({"KELVIN_DATA": "/d"})
