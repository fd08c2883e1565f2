"""Write logs as JSON lines to standard error, with the id of the current request. On a terminal, write sentences.

The supervisor redirects them into files.
"""

import asyncio
import json
import logging
import sys
import time
from typing import Final

from kelvin.contracts.redaction import redact
from kelvin.process.request_context import current_request

# The level applies to these. Libraries stay at INFO: at DEBUG some of them log the headers that they send.
PACKAGES: Final = ("activator", "controlplane", "kelvin", "runtime", "snapshotter", "weightcache")
_LEADING_FIELDS: Final = ("at", "level", "process", "logger", "message")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON line. Keys of `extra` and exceptions become fields. Secrets are redacted."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        return redact(json.dumps(self._fields(record), default=repr, ensure_ascii=False))

    def _fields(self, record: logging.LogRecord) -> dict[str, object]:
        line: dict[str, object] = {
            "at": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (found := current_request()) is not None:
            line["request_id"] = found.request_id
            if found.trace is not None:
                line["trace_id"] = f"{found.trace.trace_id:032x}"
        line.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return line


class TerminalFormatter(JsonFormatter):
    """Formats for people: `14:02:11 supervisor warning: a process died (child: activator, status: -9)`."""

    def format(self, record: logging.LogRecord) -> str:
        line = self._fields(record)
        exception = line.pop("exception", None)
        more = [f"{name}: {_printable(value)}" for name, value in line.items() if name not in _LEADING_FIELDS]
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{at} {self._process} {line['level']}: {_printable(line['message'])}"
        text += f" ({', '.join(more)})" if more else ""
        return redact(text if exception is None else f"{text}\n{exception}")


def _printable(value: object) -> str:
    """Return text without control characters, which a terminal would interpret."""
    text = str(value)
    return text if text.isprintable() else repr(text)


class _CutRequests(logging.Filter):
    """Logs a request that is cut as the process ends in one line. uvicorn would log a traceback, as for a defect.
    uvicorn logs in the request's own task. If that task was cancelled, the process is ending.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        if kind is not None and issubclass(kind, asyncio.CancelledError) and _is_cancelled():
            record.msg, record.args, record.exc_info = "a request was cut as the process ends", (), None
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        return True


def _is_cancelled() -> bool:
    """Return whether this runs in a task that was cancelled."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return False
    return task is not None and task.cancelling() > 0


_CUT_REQUESTS: Final = _CutRequests()


def configure_logging(process: str, level: int = logging.INFO) -> None:
    """Replace the root logger's handlers. May be called again after a fork, with another name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TerminalFormatter(process) if sys.stderr.isatty() else JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.INFO))
    for name in PACKAGES:
        logging.getLogger(name).setLevel(level)
    logging.getLogger("uvicorn.access").disabled = True
    logging.getLogger("uvicorn.error").addFilter(_CUT_REQUESTS)
