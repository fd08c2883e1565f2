"""The cache agent's environment, read once."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kelvin.contracts import setting_parser
from kelvin.contracts.errors import Refused
from kelvin.contracts.names import require_dns_label
from kelvin.contracts.setting_parser import BadSetting
from kelvin.crypto.node_tls import read_secrets
from kelvin.crypto.trust_roots import ROOTS
from kelvin.ipc.peer_settings import is_url, read_address
from weightcache.client.lease_protocol import HUGE_PAGE
from weightcache.fetch.trust_policy import VerificationPolicy
from weightcache.sources.verifier import Recheck

SLAB_BYTES: Final = 256 << 20
LOCAL_READS: Final = 12  # concurrent reads of a store in a directory, two per chunk: more would not be faster
REMOTE_READS: Final = 32  # concurrent reads of a remote store, where latency takes longer than the transfer
SPARE_BYTES: Final = 1 << 30
MAX_PEERS: Final = 256
_LIMIT: Final = 1 << 50
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """`listen` is where other nodes reach this one (host, port), None: nowhere. `urls` are the other nodes. `secrets`
    are shared by all nodes. Without secrets there are no peers.
    """

    listen: tuple[str, int] | None = None
    urls: tuple[str, ...] = ()
    secrets: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Settings of the agent. Sizes are in bytes, quotas in percent.

    `host_bytes` holds whole slabs, at least one; `spare_bytes` of it are prepared in advance. A quota limits one
    tenant's part of a tier while other tenants need it. `host_quota` also limits each version, even in an empty tier.
    `scrub_s` is the pause between two passes of the scrubber; 0: no scrubbing.
    """

    data: Path
    store_url: str
    host_bytes: int
    slab_bytes: int
    nvme_bytes: int
    spare_bytes: int = 0
    lifeline_fd: int | None = None
    store_reads: int = LOCAL_READS  # concurrent reads of the store
    hedge_percent: float = 0.0  # percentage of these reads that may be repeated when they are late
    host_quota: int = 100
    nvme_quota: int = 100
    scrub_s: float = 0.0
    recheck: Recheck = Recheck.TAG
    verify: VerificationPolicy = VerificationPolicy.OFF
    trust_roots: Path | None = None
    peers: PeerSettings = PeerSettings()
    tenant: str | None = None  # the only tenant whose versions are lent; None: all tenants

    @property
    def roots(self) -> Path:
        """Return the directory of trusted public keys."""
        return self.trust_roots or self.data / ROOTS

    @property
    def run(self) -> Path:
        """Return the directory of the sockets."""
        return self.data / "run"

    @property
    def cache(self) -> Path:
        """Return the directory of the NVMe tier."""
        return self.data / "cache"


def read_settings(env: Mapping[str, str] = os.environ) -> CacheSettings:
    """Read the settings. Raises `BadSetting`.

    By default the host tier has a quarter of the memory, and a quarter of that (at most 1 GiB) is prepared in advance.
    The NVMe tier has 80 % of the disk space that is free or its own. The store is a directory in KELVIN_DATA. A store
    in S3 gets more concurrent reads, and up to 5 % of them are hedged.
    """
    data = Path(setting_parser.text(env, "KELVIN_DATA")).absolute()
    slab_bytes = setting_parser.integer(env, "KELVIN_SLAB_BYTES", SLAB_BYTES, low=HUGE_PAGE, high=_LIMIT)
    if slab_bytes % HUGE_PAGE:
        raise BadSetting("KELVIN_SLAB_BYTES", str(slab_bytes), f"must be a multiple of {HUGE_PAGE}")
    quarter = max(slab_bytes, _memory_bytes() // 4)
    store_url = setting_parser.text(env, "KELVIN_STORE", (data / "store").as_uri())
    is_remote = store_url.lower().startswith("s3:")
    host_bytes = setting_parser.integer(env, "KELVIN_HOST_BYTES", quarter, low=slab_bytes, high=_LIMIT)
    lifeline_fd = setting_parser.integer(env, "KELVIN_LIFELINE_FD", -1, low=-1)
    return CacheSettings(
        data=data,
        store_url=store_url,
        host_bytes=host_bytes,
        slab_bytes=slab_bytes,
        nvme_bytes=setting_parser.integer(env, "KELVIN_NVME_BYTES", _disk_bytes(data), low=0, high=_LIMIT),
        spare_bytes=setting_parser.integer(
            env, "KELVIN_SPARE_BYTES", min(SPARE_BYTES, host_bytes // 4), low=0, high=_LIMIT
        ),
        host_quota=setting_parser.integer(env, "KELVIN_HOST_QUOTA", 100, low=1, high=100),
        nvme_quota=setting_parser.integer(env, "KELVIN_NVME_QUOTA", 100, low=1, high=100),
        scrub_s=setting_parser.number(env, "KELVIN_SCRUB_S", 3600.0, low=0, high=31_536_000),
        recheck=Recheck(setting_parser.choice(env, "KELVIN_RECHECK", Recheck.TAG, tuple(Recheck))),
        lifeline_fd=None if lifeline_fd < 0 else lifeline_fd,
        store_reads=setting_parser.integer(
            env, "KELVIN_STORE_READS", REMOTE_READS if is_remote else LOCAL_READS, low=1, high=128
        ),
        hedge_percent=setting_parser.number(env, "KELVIN_HEDGE_PERCENT", 5.0 if is_remote else 0.0, low=0.0, high=50.0),
        verify=VerificationPolicy(
            setting_parser.choice(env, "KELVIN_VERIFY", VerificationPolicy.OFF, tuple(VerificationPolicy))
        ),
        trust_roots=Path(setting_parser.text(env, "KELVIN_TRUST_ROOTS", str(data / ROOTS))).absolute(),
        peers=_peers(env),
        tenant=_tenant(env),
    )


def _tenant(env: Mapping[str, str]) -> str | None:
    name = env.get("KELVIN_CACHE_TENANT", "")
    try:
        return require_dns_label(name, "tenant") if name else None
    except Refused as refused:
        raise BadSetting("KELVIN_CACHE_TENANT", name, "must be a DNS label") from refused


def _peers(env: Mapping[str, str]) -> PeerSettings:
    listen, urls = env.get("KELVIN_PEER_LISTEN", ""), env.get("KELVIN_PEERS", "")
    if not listen and not urls:
        return PeerSettings()
    key = Path(setting_parser.text(env, "KELVIN_PEER_KEY"))
    try:
        secrets = read_secrets(key)
    except OSError as error:
        raise BadSetting("KELVIN_PEER_KEY", str(key), f"can't be read: {error.strerror}") from error
    except ValueError as error:
        raise BadSetting("KELVIN_PEER_KEY", str(key), str(error)) from error
    return PeerSettings(read_address(env, "KELVIN_PEER_LISTEN") if listen else None, _urls(urls), secrets)


def _urls(value: str) -> tuple[str, ...]:
    """Return the URLs in order, without duplicates."""
    urls = tuple(dict.fromkeys(value.replace(",", " ").split()))
    if not all(map(is_url, urls)):
        raise BadSetting("KELVIN_PEERS", value, "must be https://HOST:PORT, separated by commas")
    if len(urls) > MAX_PEERS:
        raise BadSetting("KELVIN_PEERS", value, f"must be {MAX_PEERS} or fewer")
    return urls


def _memory_bytes() -> int:
    """Return the memory of the machine, or of the control group if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine


def _disk_bytes(data: Path) -> int:
    """Return 80 % of the free space of the disk with `data`. Space that the tier uses already counts as free."""
    used_bytes = 0
    for path in (data / "cache").glob("*/??/*"):
        with suppress(OSError):  # a foreign entry, such as a link to nothing
            used_bytes += path.stat().st_size
    existing = next(path for path in (data, *data.parents) if path.exists())
    return (shutil.disk_usage(existing).free + used_bytes) * 8 // 10
