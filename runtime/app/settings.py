"""The environment of a zygote and what it forks, or of a pod. Read here, once, before torch is imported."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kelvin.contracts import setting_parser
from kelvin.contracts.artifacts.runtime_control import Pod
from kelvin.contracts.errors import Refused
from kelvin.contracts.roles import Role
from kelvin.contracts.setting_parser import BadSetting
from kelvin.contracts.wire import decode
from kelvin.devices.gpu_policy import CudaVisibility
from kelvin.ipc.peer_settings import LOCAL_ONLY, PeerSettings, read_peer_settings
from runtime.dependencies import WEIGHTS

LISTEN: Final = "KELVIN_RUNTIME_LISTEN"
STANDBY_LISTEN: Final = "KELVIN_STANDBY_LISTEN"

# An OpenMP pool that lives in the parent hangs the child that computes; rayon's pool would too.
_ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """What every process forked from one zygote shares. A pod has the same."""

    data: Path
    lifeline_fd: int | None
    drain_s: int
    restore_s: float  # how long the weight cache may take
    filters: bool = False  # whether the installation runs them
    peer_settings: PeerSettings = LOCAL_ONLY
    step_s: float = 20.0  # without progress, after which an engine hangs

    @property
    def run(self) -> Path:
        """Where the sockets are."""
        return self.data / "run"

    @property
    def meters(self) -> Path:
        """Where the meter pages are."""
        return self.run / "meters"

    @property
    def spools(self) -> Path:
        """Where durable records wait."""
        return self.data / "spool"


def read_settings(env: Mapping[str, str]) -> RuntimeSettings:
    """Raises `BadSetting`, naming variable, value and rule."""
    lifeline = setting_parser.integer(env, "KELVIN_LIFELINE_FD", -1, low=-1)
    return RuntimeSettings(
        data=Path(setting_parser.text(env, "KELVIN_DATA")).absolute(),
        lifeline_fd=None if lifeline < 0 else lifeline,
        drain_s=setting_parser.integer(env, "KELVIN_RUNTIME_DRAIN_S", 30, low=1, high=3600),
        restore_s=setting_parser.number(env, "KELVIN_RESTORE_S", WEIGHTS.timeout_s, low=1.0, high=86_400.0),
        filters=setting_parser.choice(env, "KELVIN_FILTERS", "off", ("off", "on")) == "on",
        peer_settings=read_peer_settings(env, Role.RUNTIME, LISTEN, any_port=True),
        step_s=setting_parser.number(env, "KELVIN_STEP_S", 20.0, low=1.0, high=3600.0),
    )


def read_pod(env: Mapping[str, str] = os.environ) -> Pod:
    """Return what a runtime without a zygote is to be. Raises `BadSetting`."""
    raw = setting_parser.text(env, "KELVIN_POD")
    try:
        return decode(raw.encode(), Pod)
    except Refused as refused:
        raise BadSetting("KELVIN_POD", raw, refused.failure.message) from refused


def read_parked(peer_settings: PeerSettings, env: Mapping[str, str] = os.environ) -> PeerSettings:
    """Return the settings of a waiting pod, with the address at which it is told what to take. Raises `BadSetting`."""
    setting_parser.text(env, STANDBY_LISTEN)
    told = read_peer_settings(env, Role.RUNTIME, STANDBY_LISTEN)
    return replace(peer_settings, files=told.files, listen=told.listen)


def read_visible_gpus(env: Mapping[str, str] = os.environ) -> CudaVisibility:
    """Which GPUs CUDA shows to this process; not ours to judge."""
    return CudaVisibility(env.get("CUDA_VISIBLE_DEVICES"), env.get("CUDA_DEVICE_ORDER"))


def from_environment() -> RuntimeSettings:
    """This process's settings. Also pins the libraries to one thread, which works only before they are imported."""
    os.environ.update(_ONE_THREAD)
    return read_settings(os.environ)
