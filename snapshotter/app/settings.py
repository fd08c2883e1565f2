"""The snapshotter's environment, read once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from kelvin.contracts import setting_parser
from kelvin.contracts.artifacts.manifest import CHUNK_BYTES, PAGE_BYTES
from kelvin.contracts.roles import Role
from kelvin.crypto.trust_roots import ROOTS
from kelvin.ipc.peer_settings import LOCAL_ONLY, PeerSettings, read_peer_settings
from snapshotter.dependencies import GATE, SEAL

LISTEN: Final = "KELVIN_SNAPSHOTTER_LISTEN"
_TIB: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class SnapshotterSettings:
    """The settings. `plan_age_s`: drop the staged chunks of a push that is idle for longer. `collect_grace_s`: how long
    unneeded objects are kept.
    """

    data: Path
    store_url: str
    lifeline_fd: int | None = None
    chunk_bytes: int = CHUNK_BYTES
    pack_bytes: int = 256 << 20
    plans_per_tenant: int = 16
    plan_age_s: int = 86_400
    max_version_bytes: int = _TIB
    tenant_store_bytes: int = _TIB
    gate_s: int = int(GATE.timeout_s)
    seal_s: int = int(SEAL.timeout_s)
    collect_grace_s: int = 86_400
    trust_roots: Path | None = None
    peer_settings: PeerSettings = LOCAL_ONLY
    engine: Path | None = None  # socket directory of a `kelvin engine`; None: the control plane runs jobs

    @property
    def roots(self) -> Path:
        """Return the directory of trusted public keys."""
        return self.trust_roots or self.data / ROOTS

    @property
    def run(self) -> Path:
        """Return the directory of the sockets."""
        return self.data / "run"

    @property
    def staging(self) -> Path:
        """Return the directory in which chunks wait for their commit."""
        return self.data / "staging"


def read_settings(env: Mapping[str, str]) -> SnapshotterSettings:
    """Return the settings. Raises `BadSetting` with the variable, its value and the rule."""
    data = Path(setting_parser.text(env, "KELVIN_DATA")).absolute()
    lifeline = setting_parser.integer(env, "KELVIN_LIFELINE_FD", -1, low=-1)
    chunk_bytes = setting_parser.integer(env, "KELVIN_CHUNK_BYTES", CHUNK_BYTES, low=PAGE_BYTES, high=256 << 20)
    if chunk_bytes % PAGE_BYTES:
        raise setting_parser.BadSetting("KELVIN_CHUNK_BYTES", str(chunk_bytes), f"must be a multiple of {PAGE_BYTES}")
    return SnapshotterSettings(
        data=data,
        store_url=setting_parser.text(env, "KELVIN_STORE", f"file://{quote(str(data / 'store'))}"),
        lifeline_fd=None if lifeline < 0 else lifeline,
        chunk_bytes=chunk_bytes,
        pack_bytes=setting_parser.integer(env, "KELVIN_PACK_BYTES", 256 << 20, low=PAGE_BYTES, high=4 << 30),
        plans_per_tenant=setting_parser.integer(env, "KELVIN_PUSH_PLANS", 16, low=1, high=1000),
        plan_age_s=setting_parser.integer(env, "KELVIN_PUSH_PLAN_AGE_S", 86_400, low=60),
        max_version_bytes=setting_parser.integer(env, "KELVIN_PUSH_VERSION_BYTES", _TIB, low=PAGE_BYTES),
        tenant_store_bytes=setting_parser.integer(env, "KELVIN_TENANT_STORE_BYTES", _TIB, low=0),
        gate_s=setting_parser.integer(env, "KELVIN_GATE_S", int(GATE.timeout_s), low=1, high=3600),
        seal_s=setting_parser.integer(env, "KELVIN_SEAL_S", int(SEAL.timeout_s), low=1, high=86_400),
        collect_grace_s=setting_parser.integer(env, "KELVIN_COLLECT_GRACE_S", 86_400, low=0),
        trust_roots=Path(setting_parser.text(env, "KELVIN_TRUST_ROOTS", str(data / ROOTS))).absolute(),
        peer_settings=read_peer_settings(env, Role.SNAPSHOTTER, LISTEN),
        engine=_engine(env),
    )


def _engine(env: Mapping[str, str]) -> Path | None:
    if not (value := env.get("KELVIN_ENGINE")):
        return None
    if not Path(value).is_absolute():
        raise setting_parser.BadSetting("KELVIN_ENGINE", value, "must be an absolute path")
    return Path(value)


def from_environment() -> SnapshotterSettings:
    """Return this process's settings from its environment."""
    return read_settings(os.environ)
