"""Run a forked process from its first instruction to its last: detach it from the zygote, park, serve, exit.

`app.py` does the work in between.
"""

import logging
import os
import random
import signal
from collections.abc import Collection
from typing import Final, NoReturn

import torch
from fastapi import FastAPI

from kelvin.contracts.errors import Refused
from kelvin.ipc.forked_process import socket_name
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.log import configure_logging
from kelvin.process.procfs import start_time_ns
from kelvin.process.service_lifecycle import run_service
from runtime.app import app
from runtime.app.process_memory import raise_oom_score
from runtime.app.settings import RuntimeSettings
from runtime.lifecycle.meter_writer import create_meter_page

log = logging.getLogger(__name__)

_STANDARD_FDS: Final = frozenset({0, 1, 2})


def run_standby(runtime_id: str, settings: RuntimeSettings, control: FastAPI) -> NoReturn:
    """Run a standby and exit: 0 after a drain, 1 after a failure. Never returns into the zygote's stack."""
    status = 1
    try:
        detach_process(kept_fds=() if settings.lifeline_fd is None else (settings.lifeline_fd,))
        configure_logging(f"runtime-{runtime_id}", logging.getLogger("runtime").level)
        directory = SocketDirectory(settings.run)
        listener = directory.listen(socket_name(runtime_id))
        # Count from the fork, as the supervisor does. On a busy machine a child's first line runs much later.
        meter = create_meter_page(settings.meters, runtime_id, born_ns=start_time_ns(os.getpid()))
        process = app.ReplicaProcess(runtime_id, directory, listener, meter, control)
        run_service(
            lambda stop: app.serve(process, settings, stop),
            settings.lifeline_fd,
        )
        (settings.run / socket_name(runtime_id)).unlink(missing_ok=True)
        status = 0
    except Refused as refused:
        log.error("ending", extra={"code": refused.failure.code, "why": refused.failure.message})
    except BaseException:
        log.exception("ending")
    finally:
        logging.shutdown()
        # Skip teardown of interpreter and libraries: it takes time, and other threads may still run in them.
        os._exit(status)


def detach_process(kept_fds: Collection[int]) -> None:
    """Give this process its own session, descriptors, signal handlers and random seeds, and a high OOM score."""
    os.setsid()
    raise_oom_score()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    close_other_fds(_STANDARD_FDS | frozenset(kept_fds))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    # Otherwise all children of one zygote would draw the same numbers.
    random.seed(os.urandom(16))
    torch.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)


def close_other_fds(kept_fds: Collection[int]) -> None:
    """Close every descriptor that is not in `kept_fds`."""
    for name in os.listdir("/proc/self/fd"):
        if (fd := int(name)) not in kept_fds:
            try:
                os.close(fd)
            except OSError:
                continue  # the descriptor that listdir used
