"""Where an installation is and how it is reached. The only file of the command line that reads the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from contracts.settings import choice, integer

DEFAULT_PORT: Final = 8443


@dataclass(frozen=True, slots=True)
class UpSettings:
    """What `kelvin up` itself decides by; everything else is passed through to the services."""

    data: Path
    port: int
    host: str
    ready_s: int
    drain_s: int
    store: str | None = None  # a URL; None: what the environment says
    filters: bool = False  # whether their process runs


def default_data(env: Mapping[str, str] = os.environ) -> Path:
    """`$KELVIN_DATA`, else the user's data directory (XDG Base Directory Specification)."""
    if chosen := env.get("KELVIN_DATA"):
        return Path(chosen)
    base = env.get("XDG_DATA_HOME") or str(Path(env.get("HOME", "/root")) / ".local" / "share")
    return Path(base) / "kelvin"


def load_up(data: Path, port: int | None, store: str | None, env: Mapping[str, str] = os.environ) -> UpSettings:
    """Raises BadSetting naming variable, value and rule."""
    return UpSettings(
        data=data.absolute(),
        port=port if port is not None else integer(env, "KELVIN_PORT", DEFAULT_PORT, low=1, high=65535),
        host=env.get("KELVIN_HOST", "127.0.0.1"),
        ready_s=integer(env, "KELVIN_READY_S", 60, low=1),
        drain_s=integer(env, "KELVIN_DRAIN_S", 45, low=1),
        store=store,
        filters=choice(env, "KELVIN_FILTERS", "off", ("off", "on")) == "on",
    )


def doctor_environment(data: Path, store: str | None, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The caller's environment as services would get it; nothing is checked yet."""
    return {**env, "KELVIN_DATA": str(data), **({} if store is None else {"KELVIN_STORE": store})}


def child_environment(
    settings: UpSettings, lifeline_fd: int, *, uses_store: bool, env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The caller's environment, the installation's settings, and one compute thread in whatever loads numerics.

    Credentials of the object store reach the processes that use it, and none that computes or faces callers.
    """
    kept = env if uses_store else {name: value for name, value in env.items() if not name.startswith("AWS_")}
    store = {} if settings.store is None else {"KELVIN_STORE": settings.store}
    return {
        **kept,
        **store,
        "KELVIN_DATA": str(settings.data),
        "KELVIN_HOST": settings.host,
        "KELVIN_PORT": str(settings.port),
        "KELVIN_LIFELINE_FD": str(lifeline_fd),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
