"""Run a replica without a zygote: import, bind one version or wait for an order to bind one, and serve it over TCP.

`kelvin runtime` starts it as `python -m runtime.app.pod`, next to a cache agent.
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
from kelvin.process.procfs import start_time_ns
from kelvin.process.service_lifecycle import run_service
from kelvin.process.settings import log_level
from kelvin.process.startup import BAD_SETTING_STATUS, exit_on_bad_setting
from runtime.app.settings import RuntimeSettings, from_environment, read_parked, read_pod, read_visible_gpus
from runtime.lifecycle.gpu_watch import GpuWatch
from weightcache.client.lease_protocol import SOCKET

log = logging.getLogger(__name__)

AGENT_TIMEOUT_S: Final = 60.0  # how long to wait until the cache agent listens
_POLL_S: Final = 0.02


def run(settings: RuntimeSettings, pod: Pod, visible_gpus: CudaVisibility) -> int:
    """Serve until a drain is over. Return the exit status: 0; 1 after a failure; BAD_SETTING_STATUS if the address or
    the device can't be used.
    """
    from runtime.api.control_api import build_probe_app
    from runtime.app import app, preload  # import after the settings, which limit the libraries' threads
    from runtime.lifecycle.meter_writer import create_meter_page
    from runtime.lifecycle.weights import has_device

    preload.import_all()
    if not has_device(pod.device_class):
        reason = "found no GPU that this image's libraries can use; the name of a CPU class begins with cpu-"
        log.error("no device", extra={"device_class": pod.device_class, "why": reason})
        return BAD_SETTING_STATUS
    try:
        listener = listen(pod.host, pod.port)
    except OSError as error:
        log.error("can't listen", extra={"host": pod.host, "port": pod.port, "why": error.strerror})
        return BAD_SETTING_STATUS
    with ExitStack() as stack:
        stack.enter_context(listener)
        directory = stack.enter_context(closing(SocketDirectory(settings.run)))
        devices = stack.enter_context(open_gpus_for(pod.device_class, visible_gpus))
        gpus = None if devices is None else GpuWatch(devices.read_facts)
        if _is_unhealthy(gpus):
            return 1
        if (agent := _try_connect_agent(Path(pod.agent) if pod.agent else settings.run, AGENT_TIMEOUT_S)) is None:
            log.error("the cache agent does not listen", extra={"after_s": AGENT_TIMEOUT_S})
            return 1
        stack.enter_context(closing(agent))
        # The meter counts the time of the imports, too.
        meter = create_meter_page(settings.meters, pod.runtime_id, born_ns=start_time_ns(os.getpid()))
        probes = build_probe_app(settings.step_s, gpus, may_park=pod.parked is not None)
        process = app.ReplicaProcess(
            pod.runtime_id, directory, listener, meter, probes, pod=pod, gpus=gpus, agent=agent
        )
        try:
            run_service(
                lambda stop: app.serve(process, settings, stop),
                settings.lifeline_fd,
            )
        except BadSetting as bad:  # an address that can't be listened on
            log.error("can't listen", extra={"why": str(bad)})
            return BAD_SETTING_STATUS
        except Refused as refused:
            log.error("ending", extra={"code": refused.failure.code, "why": refused.failure.message})
            return 1
        return 1 if _is_unhealthy(gpus) else 0


def open_gpus_for(device_class: str, visible_gpus: CudaVisibility) -> AbstractContextManager[Gpus | None]:
    """Return the GPUs that CUDA shows to this process, or None if the device class is a CPU or NVML can't be read."""
    from runtime.lifecycle.weights import resolve_device

    return open_gpus(shown=visible_gpus) if resolve_device(device_class).type != "cpu" else nullcontext()


def _is_unhealthy(gpus: GpuWatch | None) -> bool:
    if gpus is None or not isinstance(gpus.health, UnhealthyGpu):
        return False
    log.error("ending", extra={"code": "gpu_unhealthy", "why": gpus.health.reason})
    return True


def _try_connect_agent(path: Path, timeout_s: float) -> SocketDirectory | None:
    """Return the agent's socket directory once the agent listens, or None after `timeout_s` seconds. The pod's own
    agent listens long before our imports are over, except on a busy machine. The directory of a node's agent may not
    exist yet.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            directory = SocketDirectory(path, is_ours=False)
            try:
                directory.connect(SOCKET, socket.SOCK_SEQPACKET).close()
            except OSError:
                directory.close()
                raise
            return directory
        except OSError:
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(_POLL_S)


def main() -> None:
    """Read the settings, import the libraries, serve, and exit."""
    with exit_on_bad_setting():
        settings = from_environment()
        configure_logging("runtime", log_level())
        pod = read_pod()
        if pod.parked is not None:
            settings = replace(settings, peer_settings=read_parked(settings.peer_settings))
    status = run(settings, pod, read_visible_gpus())
    logging.shutdown()
    os._exit(status)  # skip teardown, as a standby does: other threads may still run in the libraries


if __name__ == "__main__":
    main()
