"""Log lines of a request carry its id, also across tasks and processes. The log level applies to Kelvin's own lines."""

import asyncio
import contextvars
import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from kelvin.contracts.errors import Refused
from kelvin.contracts.setting_parser import BadSetting
from kelvin.contracts.trace_context import TraceContext
from kelvin.ipc.service_client import ServiceClient
from kelvin.process.log import PACKAGES, configure_logging
from kelvin.process.request_context import set_request_context
from kelvin.process.settings import log_level
from tests.kelvin.contracts.test_redaction import KEY, SECRET
from tests.kelvin.ipc.serving import served

TRACE = TraceContext(0xABC, 0xDEF, True)


@pytest.fixture
def lines() -> Iterator[Any]:
    """Return a function that reads the lines logged since its last call. Logging is restored afterwards."""
    root, written = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level

    def configure(level: int = logging.INFO) -> None:
        configure_logging("test", level)
        (handler,) = root.handlers
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(written)

    def read() -> list[Any]:
        text = written.getvalue()
        written.seek(0)
        written.truncate()
        return [json.loads(line) for line in text.splitlines()]

    configure()
    read.configure = configure  # type: ignore[attr-defined]
    yield read
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in PACKAGES:
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_a_line_under_a_request_carries_its_id(lines: Any) -> None:
    """The id is added without the caller's help, and an explicit id wins. Outside a request there is no id."""

    def work() -> None:
        set_request_context("req_1", TRACE)
        logging.getLogger("kelvin.test").info("within")
        logging.getLogger("kelvin.test").info("another's", extra={"request_id": "req_2"})

    contextvars.copy_context().run(work)
    logging.getLogger("kelvin.test").info("outside")
    within, another, outside = lines()
    assert (within["request_id"], within["trace_id"]) == ("req_1", f"{0xABC:032x}")
    assert another["request_id"] == "req_2"
    assert "request_id" not in outside


def test_invalid_request_id_is_ignored(lines: Any) -> None:
    """An invalid id, which could break a log reader, is not used."""

    def work() -> None:
        set_request_context("two words")
        logging.getLogger("kelvin.test").info("within")

    contextvars.copy_context().run(work)
    (line,) = lines()
    assert "request_id" not in line


async def test_request_id_crosses_a_socket(tmp_path: Path, lines: Any) -> None:
    """A call passes its request id to the other service, whose lines carry it. Other calls' lines don't."""
    app = FastAPI()

    @app.get("/say")
    async def _say() -> None:
        logging.getLogger("kelvin.test").info("said")

    async def call(client: ServiceClient, request_id: str | None) -> None:
        if request_id is not None:
            set_request_context(request_id, TRACE)
        await client.call("GET", "/say", type(None), timeout_s=5)

    async with served(tmp_path, app) as service:
        for request_id in ("req_1", None, "req_2"):  # over one keep-alive connection
            await asyncio.create_task(call(service.client, request_id))
    said_lines = [line for line in lines() if line["message"] == "said"]
    assert [line.get("request_id") for line in said_lines] == ["req_1", None, "req_2"]
    assert [line.get("trace_id") for line in said_lines] == [f"{0xABC:032x}", None, f"{0xABC:032x}"]


def test_the_level_is_for_our_own_lines(lines: Any) -> None:
    """At debug level, debug lines of libraries are still dropped, because some contain request headers."""
    lines.configure(logging.DEBUG)
    logging.getLogger("kelvin.test").debug("ours")
    logging.getLogger("httpcore").debug("authorization: Bearer secret")
    logging.getLogger("httpcore").info("theirs")
    assert [line["message"] for line in lines()] == ["ours", "theirs"]
    lines.configure(logging.ERROR)
    logging.getLogger("kelvin.test").warning("ours")
    logging.getLogger("httpcore").warning("theirs")
    assert lines() == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("lines")
def test_packages_that_log_are_ours() -> None:
    """Every package that logs is listed, so that the level applies to it."""
    root = Path(__file__).parents[3]
    logging_ones = {
        path.relative_to(root).parts[0]
        for path in root.glob("*/**/*.py")
        if (root / path.relative_to(root).parts[0] / "__init__.py").exists()
        and "getLogger(__name__)" in path.read_text(encoding="utf-8")
    }
    assert logging_ones - {"coldstart_bench", "tests"} == set(PACKAGES)


def test_terminal_gets_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, `kelvin up` logs sentences. Control characters are escaped and keys are redacted."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    configure_logging("supervisor")
    log = logging.getLogger("kelvin")
    log.warning("a process died", extra={"child": "activator", "status": -9})
    log.error("a name is odd", extra={"name_of_file": "a\x1b[2Jb"})
    try:
        raise ValueError(KEY)
    except ValueError:
        log.exception("a defect")
    first, second, *traceback = terminal.getvalue().splitlines()
    assert first[8:] == " supervisor warning: a process died (child: activator, status: -9)"
    assert second[8:] == r" supervisor error: a name is odd (name_of_file: 'a\x1b[2Jb')"
    assert traceback[0].endswith("supervisor error: a defect")
    assert traceback[1].startswith("Traceback")
    assert SECRET not in terminal.getvalue()


def test_the_level_is_one_of_four() -> None:
    """The level is read from the environment and refused with its value."""
    assert log_level({}) == logging.INFO
    assert log_level({"KELVIN_LOG_LEVEL": "debug"}) == logging.DEBUG
    with pytest.raises(BadSetting, match="KELVIN_LOG_LEVEL=loud: must be one of debug, info, warning, error"):
        log_level({"KELVIN_LOG_LEVEL": "loud"})


@pytest.mark.parametrize("has_begun", [False, True], ids=["before its response", "during its response"])
async def test_cut_request_is_one_line(tmp_path: Path, lines: Any, has_begun: bool) -> None:
    """A request that is cut at the end of the drain is one warning, not a defect. Control: an application that awaits a
    cancelled future is logged with its traceback."""
    is_under_way = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/defect":
            (cancelled := asyncio.get_running_loop().create_future()).cancel()
            await cancelled
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        is_under_way.set()
        await asyncio.Event().wait()

    async with served(tmp_path, app) as service:
        with pytest.raises(Refused):
            await service.client.call("GET", "/defect", type(None), timeout_s=5)
        asking = asyncio.create_task(service.client.call("GET", "/", type(None), timeout_s=30))
        await is_under_way.wait()
        service.stop.set()
        await service.serving
        await asyncio.wait({asking})
        assert asking.exception() is not None
    defect, _, cut = (line for line in lines() if line["level"] != "info")
    assert "CancelledError" in defect["exception"]
    assert (cut["level"], cut["message"]) == ("warning", "a request was cut as the process ends")
    assert "exception" not in cut
