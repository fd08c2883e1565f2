"""The activator's environment: read here, once, and refused with the value."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from activator.policy.admission import QueueLimits
from activator.policy.queue import Bound
from contracts import settings
from contracts.names import dns_label
from telemetry.settings import OFF, TelemetrySettings
from telemetry.settings import read_settings as read_telemetry

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """What a client may cost before it is known: bytes and seconds of a connection."""

    head_bytes: int
    head_s: float
    handshake_s: float
    idle_s: int
    connections: int


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may cost: bytes of its body, seconds of its parts, and how many run at once."""

    body_bytes: int
    body_bytes_in_all: int  # of all requests inside
    upload_bytes: int  # of /admin and /push, streamed through
    body_s: float
    deadline_s: float
    stall_s: float  # a client that takes nothing for so long is cut; before its replica would be (30 s)
    requests: int
    hold_s: float = 1.0  # how long a failure may still have its true status


@dataclass(frozen=True, slots=True)
class ActivatorSettings:
    """All of it."""

    data: Path
    lifeline_fd: int | None
    host: str
    port: int
    domain: str
    drain_s: int
    edge: EdgeLimits
    request: RequestLimits
    queue: QueueLimits
    telemetry: TelemetrySettings = OFF

    @property
    def run(self) -> Path:
        """Where the sockets are."""
        return self.data / "run"

    @property
    def spools(self) -> Path:
        """Where durable records wait."""
        return self.data / "spool"


def read_settings(env: Mapping[str, str]) -> ActivatorSettings:
    """Raises `BadSetting`, naming variable, value and rule."""
    lifeline = settings.integer(env, "KELVIN_LIFELINE_FD", -1, low=-1)
    return ActivatorSettings(
        data=Path(settings.text(env, "KELVIN_DATA")).absolute(),
        lifeline_fd=None if lifeline < 0 else lifeline,
        host=settings.text(env, "KELVIN_HOST", "127.0.0.1"),
        port=settings.integer(env, "KELVIN_PORT", 8443, low=0, high=65535),
        domain=_domain(env),
        drain_s=settings.integer(env, "KELVIN_ACTIVATOR_DRAIN_S", 30, low=1, high=3600),
        edge=EdgeLimits(
            head_bytes=settings.integer(env, "KELVIN_HEAD_BYTES", 32 << 10, low=1024, high=MIB),
            head_s=settings.number(env, "KELVIN_HEAD_S", 5.0, low=0.05, high=60),
            handshake_s=settings.number(env, "KELVIN_HANDSHAKE_S", 5.0, low=0.05, high=60),
            idle_s=settings.integer(env, "KELVIN_IDLE_S", 75, low=1, high=3600),
            connections=settings.integer(env, "KELVIN_CONNECTIONS", 8192, low=1),
        ),
        request=RequestLimits(
            body_bytes=settings.integer(env, "KELVIN_BODY_BYTES", 8 * MIB, low=1024),
            body_bytes_in_all=settings.integer(env, "KELVIN_BODY_BYTES_IN_ALL", 512 * MIB, low=1024),
            upload_bytes=settings.integer(env, "KELVIN_UPLOAD_BYTES", 512 * MIB, low=1024),
            body_s=settings.number(env, "KELVIN_BODY_S", 30.0, low=0.05, high=3600),
            deadline_s=settings.number(env, "KELVIN_DEADLINE_S", 600.0, low=0.1, high=86400),
            stall_s=settings.number(env, "KELVIN_STALL_S", 20.0, low=0.1, high=3600),
            requests=settings.integer(env, "KELVIN_REQUESTS", 4096, low=1),
        ),
        queue=QueueLimits(
            per_version=Bound(
                settings.integer(env, "KELVIN_QUEUE_REQUESTS", 1024, low=1),
                settings.integer(env, "KELVIN_QUEUE_BYTES", 64 * MIB, low=1024),
            ),
            in_all=Bound(
                settings.integer(env, "KELVIN_QUEUE_REQUESTS_IN_ALL", 4096, low=1),
                settings.integer(env, "KELVIN_QUEUE_BYTES_IN_ALL", 256 * MIB, low=1024),
            ),
            wait_s=settings.number(env, "KELVIN_QUEUE_S", 600.0, low=0.1, high=86400),
        ),
        telemetry=read_telemetry(env),
    )


def from_environment() -> ActivatorSettings:
    """This process's settings."""
    return read_settings(os.environ)


def _domain(env: Mapping[str, str]) -> str:
    """The domain under which MODEL.TENANT.DOMAIN is served."""
    domain = settings.text(env, "KELVIN_DOMAIN", "kelvin.localhost").lower()
    for label in domain.split("."):
        try:
            dns_label(label, "KELVIN_DOMAIN")
        except Exception:
            raise settings.BadSetting("KELVIN_DOMAIN", domain, "must be DNS labels joined by dots") from None
    return domain
