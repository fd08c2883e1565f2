"""Read the control plane's settings. No other file of the package reads the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controlplane.db.postgres_url import BadPostgresUrl, PostgresUrl, parse_postgres_url
from controlplane.knative.cluster_settings import ClusterSettings, read_cluster
from controlplane.scaling.policy.standby_sizing import MIN_TARGET, PoolSizing
from kelvin.contracts import setting_parser
from kelvin.contracts.roles import Role
from kelvin.ipc.peer_settings import LOCAL_ONLY, PeerSettings, read_peer_settings
from kelvin.telemetry.settings import NO_TRACES, TelemetrySettings
from kelvin.telemetry.settings import read_settings as read_telemetry

LISTEN: Final = "KELVIN_CONTROL_LISTEN"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one control plane."""

    data: Path
    lifeline_fd: int | None
    standbys: int  # minimum; 0: no standbys at all
    device_slots: int
    cores: int
    threads_cap: int
    kv_bytes: int
    drain_s: float  # for a replica that is scaled down
    price_book: Path | None
    runtime_drain_s: float = 30.0  # for a runtime after SIGTERM
    memory_price: float = 1.0  # micro-units of currency per GiB of host memory and second
    standby_target: float = 0.99
    standby_share: float = 0.15
    standby_bytes: int = 1 << 30
    backup: Path | None = None
    backup_s: float = 240.0
    backup_days: int = 30
    filters: bool = False  # whether the filter process runs
    postgres: PostgresUrl | None = None
    telemetry: TelemetrySettings = NO_TRACES
    peer_settings: PeerSettings = LOCAL_ONLY
    cluster: ClusterSettings | None = None  # None: this machine runs the versions

    @property
    def run(self) -> Path:
        """The directory of the sockets."""
        return self.data / "run"

    @property
    def database(self) -> Path | PostgresUrl:
        """The SQLite file, or the URL of PostgreSQL."""
        return self.data / "kelvin.db" if self.postgres is None else self.postgres

    @property
    def spools(self) -> Path:
        """The directory in which usage records wait for the ledger."""
        return self.data / "spool"

    @property
    def term_s(self) -> float:
        """Seconds that a runtime has after SIGTERM: the drain time, then time to write its last records."""
        return self.runtime_drain_s + 10.0

    @property
    def sizing(self) -> PoolSizing:
        """Sizing of the standby pool. More standbys than device slots are of no use, since each start takes a slot."""
        max_parked = max(self.standbys, self.device_slots)
        return PoolSizing(self.standbys, max_parked, self.standby_target, self.standby_share, self.standby_bytes)


def load(env: Mapping[str, str] = os.environ) -> Settings:
    """Read all settings. Raises BadSetting with variable, value and rule."""
    lifeline = setting_parser.integer(env, "KELVIN_LIFELINE_FD", -1, low=-1)
    return Settings(
        data=Path(setting_parser.text(env, "KELVIN_DATA")).absolute(),
        lifeline_fd=None if lifeline < 0 else lifeline,
        standbys=setting_parser.integer(env, "KELVIN_STANDBYS", 1, low=0, high=64),
        standby_target=setting_parser.number(env, "KELVIN_STANDBY_TARGET", 0.99, low=MIN_TARGET, high=0.9999),
        standby_share=setting_parser.number(env, "KELVIN_STANDBY_SHARE", 0.15, low=0, high=1),
        standby_bytes=setting_parser.integer(env, "KELVIN_STANDBY_BYTES", 1 << 30, low=1 << 20),
        device_slots=setting_parser.integer(env, "KELVIN_DEVICE_SLOTS", 8, low=1, high=1024),
        filters=setting_parser.choice(env, "KELVIN_FILTERS", "off", ("off", "on")) == "on",
        cores=len(os.sched_getaffinity(0)),
        threads_cap=setting_parser.integer(env, "KELVIN_THREADS", 1, low=1, high=1024),
        kv_bytes=setting_parser.integer(env, "KELVIN_KV_BYTES", 512 << 20, low=64 << 20),
        drain_s=setting_parser.number(env, "KELVIN_SCALE_DOWN_S", 600.0, low=0, high=86_400),
        runtime_drain_s=setting_parser.integer(env, "KELVIN_RUNTIME_DRAIN_S", 30, low=1, high=3600),
        memory_price=setting_parser.number(env, "KELVIN_MEMORY_PRICE", 1.0, low=0, high=1_000_000),
        price_book=Path(env["KELVIN_PRICE_BOOK"]) if env.get("KELVIN_PRICE_BOOK") else None,
        backup=_backup(env),
        backup_s=setting_parser.number(env, "KELVIN_BACKUP_S", 240.0, low=0.5, high=86_400),
        backup_days=setting_parser.integer(env, "KELVIN_BACKUP_DAYS", 30, low=1, high=3650),
        postgres=_postgres(env),
        telemetry=read_telemetry(env),
        peer_settings=read_peer_settings(env, Role.CONTROLPLANE, LISTEN),
        cluster=read_cluster(env, setting_parser.integer(env, "KELVIN_THREADS", 1, low=1, high=1024)),
    )


def _postgres(env: Mapping[str, str]) -> PostgresUrl | None:
    """Return the URL of PostgreSQL. Errors show only the URL's scheme, because the rest may hold a password."""
    url, file = env.get("KELVIN_DATABASE"), env.get("KELVIN_DATABASE_PASSWORD_FILE")
    if not url:
        return None
    if file and not Path(file).is_absolute():
        raise setting_parser.BadSetting("KELVIN_DATABASE_PASSWORD_FILE", file, "must be an absolute path")
    try:
        return parse_postgres_url(url, Path(file) if file else None)
    except BadPostgresUrl as bad:
        scheme, rest_of_url, _ = url.partition("://")
        raise setting_parser.BadSetting(
            "KELVIN_DATABASE", f"{scheme}://..." if rest_of_url else "...", str(bad)
        ) from None


def _backup(env: Mapping[str, str]) -> Path | None:
    place = env.get("KELVIN_BACKUP")
    if not place:
        return None
    if env.get("KELVIN_DATABASE"):
        rule = "is for DATA/kelvin.db; the PostgreSQL of KELVIN_DATABASE is backed up by pg_dump, or its own archive"
        raise setting_parser.BadSetting("KELVIN_BACKUP", place, rule)
    if not Path(place).is_absolute():
        raise setting_parser.BadSetting("KELVIN_BACKUP", place, "must be an absolute path")
    return Path(place)
