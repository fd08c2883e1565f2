"""Read the environment of a zygote and its forks, or of a pod. This happens once, before torch is imported."""

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

# If the parent has an OpenMP pool, a forked child hangs when it computes. The same holds for rayon's pool. The last
# variable keeps the Hugging Face libraries from the network.
_LIBRARY_VARIABLES: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Settings shared by all processes that one zygote forks. A pod has the same settings."""

    data: Path
    lifeline_fd: int | None
    drain_s: int
    restore_s: float  # time for the weight cache to grant a lease; for a parked pod, time for a whole bind
    filters: bool = False  # whether the installation runs a filter process
    peer_settings: PeerSettings = LOCAL_ONLY
    step_s: float = 20.0  # an engine without progress for this long hangs

    @property
    def run(self) -> Path:
        """Return the directory of the sockets."""
        return self.data / "run"

    @property
    def meters(self) -> Path:
        """Return the directory of the meter pages."""
        return self.run / "meters"

    @property
    def spools(self) -> Path:
        """Return the directory in which durable records wait."""
        return self.data / "spool"


def read_settings(env: Mapping[str, str]) -> RuntimeSettings:
    """Return the settings. Raises `BadSetting` with the variable, its value and the rule."""
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
    """Return the specification of this pod. Raises `BadSetting`."""
    raw = setting_parser.text(env, "KELVIN_POD")
    try:
        return decode(raw.encode(), Pod)
    except Refused as refused:
        raise BadSetting("KELVIN_POD", raw, refused.failure.message) from refused


def read_parked(peer_settings: PeerSettings, env: Mapping[str, str] = os.environ) -> PeerSettings:
    """Return the peer settings with the address at which a parked pod receives orders. Raises `BadSetting`."""
    setting_parser.text(env, STANDBY_LISTEN)
    standby = read_peer_settings(env, Role.RUNTIME, STANDBY_LISTEN)
    return replace(peer_settings, files=standby.files, listen=standby.listen)


def read_visible_gpus(env: Mapping[str, str] = os.environ) -> CudaVisibility:
    """Return the variables that select which GPUs CUDA shows to this process. They are not validated here."""
    return CudaVisibility(env.get("CUDA_VISIBLE_DEVICES"), env.get("CUDA_DEVICE_ORDER"))


def from_environment() -> RuntimeSettings:
    """Return this process's settings. Also limits libraries to one thread and takes the Hugging Face hub offline, which
    works only before their import.
    """
    os.environ.update(_LIBRARY_VARIABLES)
    return read_settings(os.environ)
