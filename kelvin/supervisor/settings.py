"""Settings of the supervisors, and the environments of their processes.

Only this module reads them from the environment. Exception: click reads the variables of command options.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kelvin.contracts.artifacts.runtime_control import BindRequest, ParkedSpec, Pod
from kelvin.contracts.roles import Role
from kelvin.contracts.serving.machine import available_bytes, kv_bytes_for
from kelvin.contracts.setting_parser import BadSetting, choice, integer, text
from kelvin.contracts.wire import encode
from kelvin.ipc.peer_settings import LOCAL_ONLY, PeerSettings, read_peer_settings

DEFAULT_PORT: Final = 8443
URL: Final = "KELVIN_URL"  # these three choose the installation of a command that has no such option
CA: Final = "KELVIN_CA"
KEY: Final = "KELVIN_KEY"
STANDBY_LISTEN: Final = "KELVIN_STANDBY_LISTEN"  # where a standby pod gets bind requests
DEFAULT_POD_PORT: Final = 8080  # Knative's default
_LIBRARY_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True)
class UpSettings:
    """Settings of `kelvin up` itself. All others are passed through to the services."""

    data: Path
    port: int
    host: str
    ready_s: int
    drain_s: int
    store: str | None = None  # a URL; None: taken from the environment
    filters: bool = False  # whether the filter process runs


@dataclass(frozen=True, slots=True)
class PodSettings:
    """Settings of `kelvin runtime`: its data directory, its drain time, its processes' extra environment.
    `peer_settings` names the ledger, if any. The running lifetime is reported every `life_s` seconds.
    """

    data: Path
    drain_s: int
    extra_environment: Mapping[str, str]
    pod: Pod
    peer_settings: PeerSettings = LOCAL_ONLY
    life_s: int = 30
    has_agent: bool = True  # it has its own cache agent


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of `kelvin engine`: its data directory, and the URL of the store that holds drafts."""

    data: Path
    store: str


def load_pod(
    data: Path,
    binding: BindRequest | ParkedSpec,
    runtime_id: str,
    host: str,
    store: str | None,
    port: int | None,
    cache: Path | None = None,
    env: Mapping[str, str] = os.environ,
) -> PodSettings:
    """Return the settings of `kelvin runtime`. Raises BadSetting.

    It needs a store to restore from, unless a `cache` agent has one. A standby also needs STANDBY_LISTEN and a store.
    `cache` may be a relative path; KELVIN_CACHE_AGENT may not.
    """
    agent = env.get("KELVIN_CACHE_AGENT", "") if cache is None else str(cache.absolute())
    if agent and not Path(agent).is_absolute():
        raise BadSetting("KELVIN_CACHE_AGENT", agent, "must be an absolute path")
    requested_bytes = integer(env, "KELVIN_KV_BYTES", 512 << 20, low=64 << 20)
    available = available_bytes(Path("/proc/meminfo").read_text())
    binding = msgspec.structs.replace(binding, kv_bytes=kv_bytes_for(requested_bytes, available))
    listens = integer(env, "PORT", DEFAULT_POD_PORT, low=1, high=65535) if port is None else port
    if isinstance(binding, ParkedSpec):
        binding = msgspec.structs.replace(binding, store=store or text(env, "KELVIN_STORE"))
        text(env, STANDBY_LISTEN)
        read_peer_settings(env, Role.RUNTIME, STANDBY_LISTEN)
        pod = Pod(runtime_id=runtime_id, parked=binding, host=host, port=listens, agent=agent)
    else:
        pod = Pod(runtime_id=runtime_id, bind=binding, host=host, port=listens, agent=agent)
    return PodSettings(
        data=data.absolute(),
        drain_s=integer(env, "KELVIN_RUNTIME_DRAIN_S", 30, low=1, high=3600),
        extra_environment={} if agent else {"KELVIN_STORE": store or text(env, "KELVIN_STORE")},
        pod=pod,
        peer_settings=read_peer_settings(env, Role.RUNTIME),
        life_s=integer(env, "KELVIN_LIFE_S", 30, low=1, high=45),  # plus the time to send it: less than SO_FAR_S
        has_agent=not agent,
    )


def load_engine(data: Path, store: str | None, env: Mapping[str, str] = os.environ) -> EngineSettings:
    """Return the settings of `kelvin engine`. Raises BadSetting."""
    return EngineSettings(data.absolute(), store or text(env, "KELVIN_STORE"))


def agent_environment(
    data: Path, tenant: str, store: str | None, env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a node's cache agent. Raises BadSetting."""
    return {
        **env,
        "KELVIN_DATA": str(data.absolute()),
        "KELVIN_STORE": store or text(env, "KELVIN_STORE"),
        "KELVIN_CACHE_TENANT": tenant,
        **_LIBRARY_ENVIRONMENT,
    }


def require_data(env: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path in `$KELVIN_DATA`, or None."""
    return Path(chosen) if (chosen := env.get("KELVIN_DATA")) else None


def default_data(env: Mapping[str, str] = os.environ) -> Path:
    """Return `$KELVIN_DATA`, else the user's data directory (XDG Base Directory Specification)."""
    if (chosen := require_data(env)) is not None:
        return chosen
    base = env.get("XDG_DATA_HOME") or str(Path(env.get("HOME", "/root")) / ".local" / "share")
    return Path(base) / "kelvin"


def has_postgres(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether `$KELVIN_DATABASE` names the control plane's database, which is then not DATA/kelvin.db."""
    return bool(env.get("KELVIN_DATABASE"))


def load_up(data: Path, port: int | None, store: str | None, env: Mapping[str, str] = os.environ) -> UpSettings:
    """Return the settings of `kelvin up`. Raises BadSetting with variable, value and rule."""
    return UpSettings(
        data=data.absolute(),
        port=port if port is not None else integer(env, "KELVIN_PORT", DEFAULT_PORT, low=1, high=65535),
        host=env.get("KELVIN_HOST", "127.0.0.1"),
        ready_s=integer(env, "KELVIN_READY_S", 120, low=1),
        drain_s=integer(env, "KELVIN_DRAIN_S", 45, low=1),
        store=store,
        filters=choice(env, "KELVIN_FILTERS", "off", ("off", "on")) == "on",
    )


def doctor_environment(data: Path, store: str | None, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the caller's environment as services would get it. Nothing is validated."""
    return {**env, "KELVIN_DATA": str(data), **({} if store is None else {"KELVIN_STORE": store})}


def pod_environment(
    settings: PodSettings, lifeline_fd: int, runtime_id: str, *, uses_store: bool, env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a pod's processes. The runtime is called `runtime_id`."""
    pod = encode(msgspec.structs.replace(settings.pod, runtime_id=runtime_id)).decode()
    return _environment(settings.data, lifeline_fd, {**settings.extra_environment, "KELVIN_POD": pod}, uses_store, env)


def engine_environment(
    settings: EngineSettings, lifeline_fd: int, *, uses_store: bool, env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of an engine's processes."""
    return _environment(settings.data, lifeline_fd, {"KELVIN_STORE": settings.store}, uses_store, env)


def child_environment(
    settings: UpSettings, lifeline_fd: int, *, uses_store: bool, env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of an installation's processes."""
    extra_environment = {"KELVIN_HOST": settings.host, "KELVIN_PORT": str(settings.port)}
    if settings.store is not None:
        extra_environment["KELVIN_STORE"] = settings.store
    return _environment(settings.data, lifeline_fd, extra_environment, uses_store, env)


def _environment(
    data: Path, lifeline_fd: int, extra_environment: Mapping[str, str], uses_store: bool, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the caller's environment with these additions, and one compute thread for numeric libraries. Object store
    credentials reach only processes that use the store, never those that compute or face callers.
    """
    inherited = env if uses_store else {name: value for name, value in env.items() if not name.startswith("AWS_")}
    own_variables = {"KELVIN_DATA": str(data), "KELVIN_LIFELINE_FD": str(lifeline_fd)}
    return {**inherited, **extra_environment, **own_variables, **_LIBRARY_ENVIRONMENT}
