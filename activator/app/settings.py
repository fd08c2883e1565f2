"""Read the activator's settings from the environment once; an error names the value."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from activator.answers.idempotency_policy import CACHE_LIMITS, DEFAULT_LIMITS, AnswerStoreLimits
from activator.auth.issuers import TrustedIssuer, read_issuers
from activator.dependencies import FIREWALL
from activator.http.address_limits_policy import AddressLimits, parse_networks
from activator.http.exchange import RequestLimits
from activator.http.listener_state import ConnectionLimits
from activator.queue.policy.admission import QueueLimits
from activator.queue.policy.queue_bounds import QueueLimit
from kelvin.contracts import setting_parser
from kelvin.contracts.names import require_dns_label
from kelvin.contracts.roles import Role
from kelvin.ipc.peer_settings import LOCAL_ONLY, PeerSettings, is_remote, read_address, read_peer_settings
from kelvin.telemetry.settings import NO_TRACES, TelemetrySettings
from kelvin.telemetry.settings import read_settings as read_telemetry

MIB = 1 << 20
SOCKET_BYTES = 107  # longest socket path of the kernel (unix(7))


@dataclass(frozen=True, slots=True)
class FirewallSettings:
    """The firewall's socket, its time limit, and what happens without an answer."""

    socket: Path
    timeout_s: float
    unanswered: Literal["refuse", "allow"]


@dataclass(frozen=True, slots=True)
class ActivatorSettings:
    """The activator's settings, as read from the environment."""

    data: Path
    lifeline_fd: int | None
    listener_fd: int | None
    host: str
    port: int
    domain: str
    drain_s: int
    connections: ConnectionLimits
    request: RequestLimits
    queue: QueueLimits
    certificates: Path | None = None  # a directory of externally issued certificates
    telemetry: TelemetrySettings = NO_TRACES
    issuers: tuple[TrustedIssuer, ...] = ()
    redis: str | None = field(default=None, repr=False)  # URL for shared limits; may contain a password
    subsets: bool = True  # whether each of many activators prefers some replicas of a version
    idempotency: AnswerStoreLimits = DEFAULT_LIMITS
    cache: AnswerStoreLimits = CACHE_LIMITS
    firewall: FirewallSettings | None = None
    breaker_s: float = 30.0  # longest time that a breaker stays open
    hedges: bool = True  # whether a late request is sent to a second replica
    peer_settings: PeerSettings = LOCAL_ONLY
    max_feed_age_s: float = 14_400.0  # how long a kept feed admits requests
    autoscaler: str | None = None  # URL of Knative's autoscaler; None: the control plane scales
    data_path: tuple[str, int] | None = None  # address of Knative's data path

    @property
    def is_on_cluster(self) -> bool:
        """Whether replicas are pods that Knative scales."""
        return self.autoscaler is not None

    @property
    def is_remote(self) -> bool:
        """Whether the control plane and its replicas are on another host."""
        return is_remote(self.peer_settings.control)

    @property
    def socket_directory(self) -> Path:
        """The directory of the sockets."""
        return self.data / "run"

    @property
    def spool_directory(self) -> Path:
        """The directory of records that have not been shipped."""
        return self.data / "spool"


def read_settings(env: Mapping[str, str]) -> ActivatorSettings:
    """Return the settings. Raises BadSetting, naming variable, value and rule."""
    _refuse_http2(env)
    lifeline = setting_parser.integer(env, "KELVIN_LIFELINE_FD", -1, low=-1)
    listener = setting_parser.integer(env, "KELVIN_LISTENER_FD", -1, low=-1)
    return ActivatorSettings(
        data=Path(setting_parser.text(env, "KELVIN_DATA")).absolute(),
        lifeline_fd=None if lifeline < 0 else lifeline,
        listener_fd=None if listener < 0 else listener,
        host=setting_parser.text(env, "KELVIN_HOST", "127.0.0.1"),
        port=setting_parser.integer(env, "KELVIN_PORT", 8443, low=0, high=65535),
        domain=_domain(env),
        drain_s=setting_parser.integer(env, "KELVIN_ACTIVATOR_DRAIN_S", 30, low=1, high=3600),
        connections=ConnectionLimits(
            head_bytes=setting_parser.integer(env, "KELVIN_HEAD_BYTES", 32 << 10, low=1024, high=MIB),
            head_s=setting_parser.number(env, "KELVIN_HEAD_S", 5.0, low=0.05, high=60),
            handshake_s=setting_parser.number(env, "KELVIN_HANDSHAKE_S", 5.0, low=0.05, high=60),
            idle_s=setting_parser.integer(env, "KELVIN_IDLE_S", 75, low=1, high=3600),
            lame_duck_s=setting_parser.integer(env, "KELVIN_LAME_DUCK_S", 3, low=0, high=600),
            connections=setting_parser.integer(env, "KELVIN_CONNECTIONS", 8192, low=1),
            headers=setting_parser.integer(env, "KELVIN_HEADERS", 100, low=8, high=10_000),
            body_rate=setting_parser.number(env, "KELVIN_BODY_RATE", 1024.0, low=0),
            address=_address_limits(env),
            stall_s=_stall_s(env),
        ),
        request=RequestLimits(
            body_bytes=setting_parser.integer(env, "KELVIN_BODY_BYTES", 8 * MIB, low=1024),
            body_bytes_in_all=setting_parser.integer(env, "KELVIN_BODY_BYTES_IN_ALL", 512 * MIB, low=1024),
            upload_bytes=setting_parser.integer(env, "KELVIN_UPLOAD_BYTES", 512 * MIB, low=1024),
            body_s=setting_parser.number(env, "KELVIN_BODY_S", 30.0, low=0.05, high=3600),
            deadline_s=setting_parser.number(env, "KELVIN_DEADLINE_S", 600.0, low=0.1, high=86400),
            stall_s=_stall_s(env),
            requests=setting_parser.integer(env, "KELVIN_REQUESTS", 4096, low=1),
        ),
        queue=QueueLimits(
            per_version=QueueLimit(
                setting_parser.integer(env, "KELVIN_QUEUE_REQUESTS", 1024, low=1),
                setting_parser.integer(env, "KELVIN_QUEUE_BYTES", 64 * MIB, low=1024),
                setting_parser.integer(env, "KELVIN_QUEUE_TOKENS", 8 << 20, low=1),
            ),
            per_tenant=QueueLimit(
                setting_parser.integer(env, "KELVIN_QUEUE_REQUESTS_PER_TENANT", 2048, low=1),
                setting_parser.integer(env, "KELVIN_QUEUE_BYTES_PER_TENANT", 128 * MIB, low=1024),
                setting_parser.integer(env, "KELVIN_QUEUE_TOKENS_PER_TENANT", 16 << 20, low=1),
            ),
            total=QueueLimit(
                setting_parser.integer(env, "KELVIN_QUEUE_REQUESTS_IN_ALL", 4096, low=1),
                setting_parser.integer(env, "KELVIN_QUEUE_BYTES_IN_ALL", 256 * MIB, low=1024),
                setting_parser.integer(env, "KELVIN_QUEUE_TOKENS_IN_ALL", 32 << 20, low=1),
            ),
            wait_s=setting_parser.number(env, "KELVIN_QUEUE_S", 600.0, low=0.1, high=86400),
        ),
        certificates=_certificates(env),
        idempotency=AnswerStoreLimits(
            ttl_s=setting_parser.number(env, "KELVIN_ONCE_S", 86_400.0, low=1, high=86_400),
            answer_bytes=setting_parser.integer(env, "KELVIN_ONCE_ANSWER_BYTES", 4 * MIB, low=1024),
            tenant_answers=setting_parser.integer(env, "KELVIN_ONCE_ANSWERS_PER_TENANT", 10_000, low=1),
            tenant_bytes=setting_parser.integer(env, "KELVIN_ONCE_BYTES_PER_TENANT", 32 * MIB, low=1024),
            answers=setting_parser.integer(env, "KELVIN_ONCE_ANSWERS", 100_000, low=1),
            nbytes=setting_parser.integer(env, "KELVIN_ONCE_BYTES", 128 * MIB, low=1024),
        ),
        cache=replace(
            CACHE_LIMITS,
            ttl_s=setting_parser.number(env, "KELVIN_CACHE_S", 300.0, low=1, high=3600),
            tenant_bytes=setting_parser.integer(env, "KELVIN_CACHE_BYTES_PER_TENANT", 16 * MIB, low=1024),
            nbytes=setting_parser.integer(env, "KELVIN_CACHE_BYTES", 64 * MIB, low=1024),
        ),
        telemetry=read_telemetry(env),
        max_feed_age_s=setting_parser.number(env, "KELVIN_FEED_MAX_AGE_S", 14_400.0, low=1, high=2_592_000),
        peer_settings=read_peer_settings(env, Role.ACTIVATOR),
        redis=_redis(env),
        subsets=setting_parser.choice(env, "KELVIN_SUBSETS", "auto", ("auto", "off")) == "auto",
        autoscaler=_autoscaler(env),
        data_path=read_address(env, "KELVIN_ACTIVATOR_LISTEN") if env.get("KELVIN_ACTIVATOR_LISTEN") else None,
        firewall=_firewall(env),
        breaker_s=setting_parser.number(env, "KELVIN_BREAKER_S", 30.0, low=1, high=3600),
        hedges=setting_parser.choice(env, "KELVIN_HEDGE_REQUESTS", "on", ("on", "off")) == "on",
        issuers=read_issuers(Path(env["KELVIN_OIDC"])) if env.get("KELVIN_OIDC") else (),
    )


def from_environment() -> ActivatorSettings:
    """Return the settings of this process. Raises BadSetting."""
    return read_settings(os.environ)


def _certificates(env: Mapping[str, str]) -> Path | None:
    if "KELVIN_CERTIFICATES" not in env:
        return None
    directory = env["KELVIN_CERTIFICATES"]
    if not directory.startswith("/"):
        raise setting_parser.BadSetting("KELVIN_CERTIFICATES", directory, "must be an absolute path")
    return Path(directory)


def _firewall(env: Mapping[str, str]) -> FirewallSettings | None:
    within_ms = setting_parser.integer(env, "KELVIN_WAF_MS", round(FIREWALL.timeout_s * 1000), low=1, high=10_000)
    unanswered = setting_parser.choice(env, "KELVIN_WAF_UNANSWERED", "refuse", ("refuse", "allow"))
    socket = env.get("KELVIN_WAF_SOCKET")
    if not socket:
        return None
    if not socket.startswith("/") or len(os.fsencode(socket)) > SOCKET_BYTES:
        rule = f"must be an absolute path of {SOCKET_BYTES} bytes or fewer"
        raise setting_parser.BadSetting("KELVIN_WAF_SOCKET", socket, rule)
    return FirewallSettings(Path(socket), within_ms / 1000, "allow" if unanswered == "allow" else "refuse")


def _address_limits(env: Mapping[str, str]) -> AddressLimits:
    """Return the limits per address. By default this machine's own addresses are trusted, e.g. for a proxy."""
    trusted = setting_parser.text(env, "KELVIN_TRUSTED_ADDRESSES", "127.0.0.0/8,::1")
    try:
        trusted_networks = parse_networks(trusted)
    except ValueError:
        rule = "must be networks as 10.0.0.0/8, separated by commas, or none"
        raise setting_parser.BadSetting("KELVIN_TRUSTED_ADDRESSES", trusted, rule) from None
    return AddressLimits(
        max_connections=setting_parser.integer(env, "KELVIN_ADDRESS_CONNECTIONS", 1024, low=1),
        rate=setting_parser.number(env, "KELVIN_ADDRESS_RATE", 1000.0, low=1),
        trusted=trusted_networks,
    )


def _stall_s(env: Mapping[str, str]) -> float:
    return setting_parser.number(env, "KELVIN_STALL_S", 20.0, low=0.1, high=3600)


def _refuse_http2(env: Mapping[str, str]) -> None:
    """Refuse a setting of earlier versions, which spoke HTTP/2, and say what to do instead."""
    if (value := env.get("KELVIN_HTTP2", "off")) != "off":
        rule = "must be off: a proxy in front of Kelvin speaks HTTP/2 and HTTP/3, see docs/operations/front-door.md"
        raise setting_parser.BadSetting("KELVIN_HTTP2", value, rule)


def _redis(env: Mapping[str, str]) -> str | None:
    """Return the URL. Errors do not show its password."""
    if "KELVIN_REDIS" not in env:
        return None
    url = env["KELVIN_REDIS"]
    scheme, _, rest = url.partition("://")
    try:
        port = urlsplit(url).port
    except ValueError:
        port = 0
    is_known_scheme = scheme in ("redis", "rediss", "unix")
    if not is_known_scheme or not rest or port == 0:
        safe_url = f"{scheme}://..." if is_known_scheme else "..."
        raise setting_parser.BadSetting("KELVIN_REDIS", safe_url, "must be redis://, rediss:// or unix://, and a place")
    return url


def _autoscaler(env: Mapping[str, str]) -> str | None:
    if "KELVIN_AUTOSCALER" not in env:
        return None
    url = env["KELVIN_AUTOSCALER"]
    try:
        parts = urlsplit(url)
        if parts.scheme == "ws" and parts.hostname and parts.port and url == f"ws://{parts.netloc}" and "@" not in url:
            return url
    except ValueError:  # unbalanced brackets, or an invalid port
        pass
    raise setting_parser.BadSetting("KELVIN_AUTOSCALER", url, "must be ws://HOST:PORT")


def _domain(env: Mapping[str, str]) -> str:
    """Return the domain under which MODEL.TENANT.DOMAIN is served."""
    domain = setting_parser.text(env, "KELVIN_DOMAIN", "kelvin.localhost").lower()
    for label in domain.split("."):
        try:
            require_dns_label(label, "KELVIN_DOMAIN")
        except Exception:
            raise setting_parser.BadSetting("KELVIN_DOMAIN", domain, "must be DNS labels joined by dots") from None
    return domain
