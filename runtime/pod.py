"""A runtime that nobody forked: a process that imports, takes the one version that it was started for, and serves it
over TCP. Started as `python -m runtime.pod` by `kelvin runtime`, beside a cache agent of its own.
"""

import logging
import os
import socket
import time
from contextlib import closing
from typing import Final

from contracts.errors import Refused
from contracts.jobs import Pod
from runtime.settings import RuntimeSettings, from_environment, read_pod
from service.listener import listen
from service.log import configure_logging
from service.run import run_service
from service.settings import log_level
from service.startup import BAD_SETTING_STATUS, refusing_bad_settings
from service.unix import SocketDirectory
from weightcache.wire import SOCKET

log = logging.getLogger(__name__)

AGENT_S: Final = 60.0  # for the cache agent to listen
_POLL_S: Final = 0.02


def run(settings: RuntimeSettings, pod: Pod) -> int:
    """Serve until a drain is over: 0, or 1 after a failure, BAD_SETTING_STATUS where the address can't be had."""
    from runtime import app, preload  # after the settings, which pin the libraries' threads
    from runtime.metering import create_meter_page
    from runtime.pod_api import build_probes

    preload.imports()
    try:
        listener = listen(pod.host, pod.port)
    except OSError as error:
        log.error("can't listen", extra={"host": pod.host, "port": pod.port, "why": error.strerror})
        return BAD_SETTING_STATUS
    with closing(SocketDirectory(settings.run)) as directory:
        if not _agent_listens(directory, AGENT_S):
            log.error("the cache agent does not listen", extra={"after_s": AGENT_S})
            return 1
        meter = create_meter_page(settings.meters, pod.runtime_id)
        probes = build_probes()
        try:
            run_service(
                lambda stop: app.serve(
                    pod.runtime_id, settings, directory, listener, meter, probes, stop, own=pod.bind
                ),
                settings.lifeline_fd,
            )
        except Refused as refused:
            log.error("ending", extra={"code": refused.failure.code, "why": refused.failure.message})
            return 1
    return 0


def _agent_listens(directory: SocketDirectory, patience_s: float) -> bool:
    """It was started with us, and is there long before our imports are over, but on a busy machine."""
    limit = time.monotonic() + patience_s
    while True:
        try:
            directory.connect(SOCKET, socket.SOCK_SEQPACKET).close()
        except OSError:
            if time.monotonic() >= limit:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def main() -> None:
    """Settings first, then the imports."""
    with refusing_bad_settings():
        settings = from_environment()
        configure_logging("runtime", log_level())
        pod = read_pod()
    status = run(settings, pod)
    logging.shutdown()
    os._exit(status)  # as a forked one: nothing in the libraries is worth tearing down, and threads may be in them


if __name__ == "__main__":
    main()
