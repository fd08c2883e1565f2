"""A runtime that nobody forked: a process that imports, takes the one version that it was started for, or waits to be
told of one, and serves it over TCP. Started as `python -m runtime.app.pod` by `kelvin runtime`, beside a cache agent of
its own.
"""

import logging
import os
import socket
import time
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

from kelvin.contracts.artifacts.runtime_control import Pod
from kelvin.contracts.errors import Refused
from kelvin.contracts.setting_parser import BadSetting
from kelvin.devices.gpu_policy import CudaVisibility, UnhealthyGpu
from kelvin.devices.nvml import Gpus, open_gpus
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.tcp_listener import listen
from kelvin.process.log import configure_logging
from kelvin.process.procfs import born_ns
from kelvin.process.service_lifecycle import run_service
from kelvin.process.settings import log_level
from kelvin.process.startup import BAD_SETTING_STATUS, refusing_bad_settings
from runtime.app.settings import RuntimeSettings, from_environment, read_parked, read_pod, read_visible_gpus
from runtime.lifecycle.gpu_watch import GpuWatch
from weightcache.client.lease_protocol import SOCKET

log = logging.getLogger(__name__)

AGENT_TIMEOUT_S: Final = 60.0  # for the cache agent to listen
_POLL_S: Final = 0.02


def run(settings: RuntimeSettings, pod: Pod, shown: CudaVisibility) -> int:
    """Serve until a drain is over: 0, or 1 after a failure, BAD_SETTING_STATUS where the address or the device can't be
    had.
    """
    from runtime.api.control_api import build_probe_app
    from runtime.app import app, preload  # after the settings, which pin the libraries' threads
    from runtime.lifecycle.meter_writer import create_meter_page
    from runtime.lifecycle.weights import has_device

    preload.import_all()
    if not has_device(pod.device_class):
        why = "no GPU that this image's libraries could compute on is here; a class of processors begins with cpu-"
        log.error("no device", extra={"device_class": pod.device_class, "why": why})
        return BAD_SETTING_STATUS
    try:
        listener = listen(pod.host, pod.port)
    except OSError as error:
        log.error("can't listen", extra={"host": pod.host, "port": pod.port, "why": error.strerror})
        return BAD_SETTING_STATUS
    with ExitStack() as stack:
        stack.enter_context(listener)
        directory = stack.enter_context(closing(SocketDirectory(settings.run)))
        devices = stack.enter_context(opened_for(pod.device_class, shown))
        gpus = None if devices is None else GpuWatch(devices.read_facts)
        if _is_unhealthy(gpus):
            return 1
        if (agent := _try_connect_agent(Path(pod.agent) if pod.agent else settings.run, AGENT_TIMEOUT_S)) is None:
            log.error("the cache agent does not listen", extra={"after_s": AGENT_TIMEOUT_S})
            return 1
        stack.enter_context(closing(agent))
        born = born_ns(os.getpid())  # imports are of its life, too
        meter = create_meter_page(settings.meters, pod.runtime_id, born_ns=born)
        probes = build_probe_app(settings.step_s, gpus, may_park=pod.parked is not None)
        try:
            run_service(
                lambda stop: app.serve(
                    pod.runtime_id, settings, directory, listener, meter, probes, stop, pod=pod, gpus=gpus, agent=agent
                ),
                settings.lifeline_fd,
            )  # fmt: skip
        except BadSetting as bad:  # an address that can't be listened on
            log.error("can't listen", extra={"why": str(bad)})
            return BAD_SETTING_STATUS
        except Refused as refused:
            log.error("ending", extra={"code": refused.failure.code, "why": refused.failure.message})
            return 1
        return 1 if _is_unhealthy(gpus) else 0


def opened_for(device_class: str, shown: CudaVisibility) -> AbstractContextManager[Gpus | None]:
    """The GPUs that CUDA shows to this process, where it is to compute on one and they can be asked."""
    from runtime.lifecycle.weights import resolve_device

    return open_gpus(shown=shown) if resolve_device(device_class).type != "cpu" else nullcontext()


def _is_unhealthy(gpus: GpuWatch | None) -> bool:
    if gpus is None or not isinstance(gpus.health, UnhealthyGpu):
        return False
    log.error("ending", extra={"code": "gpu_unhealthy", "why": gpus.health.reason})
    return True


def _try_connect_agent(place: Path, patience_s: float) -> SocketDirectory | None:
    """The agent's sockets, once it listens; None where it doesn't. One of our own was started with us, and is there
    long before our imports are over, but on a busy machine. Of a node's the directory need not be there yet, either.
    """
    limit = time.monotonic() + patience_s
    while True:
        try:
            directory = SocketDirectory(place, is_ours=False)
            try:
                directory.connect(SOCKET, socket.SOCK_SEQPACKET).close()
            except OSError:
                directory.close()
                raise
            return directory
        except OSError:
            if time.monotonic() >= limit:
                return None
            time.sleep(_POLL_S)


def main() -> None:
    """Settings first, then the imports."""
    with refusing_bad_settings():
        settings = from_environment()
        configure_logging("runtime", log_level())
        pod = read_pod()
        if pod.parked is not None:
            settings = replace(settings, peer_settings=read_parked(settings.peer_settings))
    status = run(settings, pod, read_visible_gpus())
    logging.shutdown()
    os._exit(status)  # as a forked one: nothing in the libraries is worth tearing down, and threads may be in them


if __name__ == "__main__":
    main()
