"""JSON logs, one object a line, on standard error; the supervisor files them. A line under a request carries its id."""

import asyncio
import json
import logging
import sys
from typing import Final

from contracts.secrets import redact
from service.cause import cause

# The level is for these. Libraries stay at INFO: at DEBUG some of them write the headers that they send.
OURS: Final = (
    "activator", "blobstore", "controlplane", "kelvin", "runtime", "service", "snapshotter", "spool", "telemetry",
    "weightcache",
)  # fmt: skip
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """`extra` keys become fields. Exceptions are one field, so that a line stays a line. Secrets of keys stay out."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (found := cause()) is not None:
            line["request_id"] = found.request_id
            if found.trace is not None:
                line["trace_id"] = f"{found.trace.trace_id:032x}"
        line.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return redact(json.dumps(line, default=repr, ensure_ascii=False))


class _CutRequests(logging.Filter):
    """Log a request that is cut as the process ends in one line. uvicorn has a traceback for it, as for a defect.

    uvicorn logs in the request's own task. Only where that task itself was cancelled is it the process that ends.
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
    """Replace the root's handlers; safe to call again after a fork, under another name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.INFO))
    for name in OURS:
        logging.getLogger(name).setLevel(level)
    logging.getLogger("uvicorn.access").disabled = True
    logging.getLogger("uvicorn.error").addFilter(_CUT_REQUESTS)
