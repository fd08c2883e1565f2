"""Send bind and release commands to a parked pod over mutual TLS, with the certificate of any role."""

import http.client
import json
import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coldstart_bench.harness.installation import free_port
from kelvin.contracts.artifacts.runtime_control import BindPodRequest
from kelvin.contracts.roles import Role
from kelvin.contracts.wire import encode
from tests.kelvin.crypto.pki import Authority, write
from tests.runtime.processes import DEADLINE_S, Installation
from tests.weightcache.kit import TENANT, Version


def take_of(house: Installation, version: Version, weight_bytes: int = 1000) -> BindPodRequest:
    """Return a bind request for `version` on `cpu-1`, with the installation's store."""
    store = (house.data / "store").as_uri()
    return BindPodRequest(
        tenant=TENANT, model="m", version=version.id, device_class="cpu-1", store=store, weight_bytes=weight_bytes
    )


@dataclass(frozen=True)
class Orders:
    """A client for the pod at `port`, which authenticates as `role`."""

    inner: Path
    port: int
    role: Role = Role.CONTROLPLANE
    host: str = "127.0.0.1"

    @classmethod
    def made(cls, place: Path) -> "Orders":
        """Return a client with new certificates for all roles and a free port."""
        inner, authority = place / "inner", Authority()
        for role in Role:
            write(inner / role, authority.of(role), authority)
        return cls(inner, free_port())

    @property
    def settings(self) -> dict[str, str]:
        """The pod's settings, without the `KELVIN_` prefix."""
        return {"STANDBY_LISTEN": f"{self.host}:{self.port}", "INNER_TLS": str(self.inner)}

    def by(self, role: Role) -> "Orders":
        return replace(self, role=role)

    def state(self) -> dict[str, Any] | None:
        """Return the pod's state, or None while nothing listens on the port."""
        try:
            return self.ask("GET", "/control/state")[1]
        except OSError:
            return None

    def parked(self, other_than: str = "") -> str | None:
        """Return the runtime id of the parked runtime, or None if there is none or it is `other_than`."""
        if (state := self.state()) is None or state["state"] != "standby" or state["runtime_id"] == other_than:
            return None
        return str(state["runtime_id"])

    def tell(self, what: str, take: BindPodRequest) -> tuple[int, dict[str, Any]]:
        """Send a bind or release command (`what`) and return status and body."""
        return self.ask("POST", f"/control/{what}", encode(take))

    def open(self, what: str, take: BindPodRequest) -> http.client.HTTPSConnection:
        """Send a bind or release command and return the connection without waiting for the response."""
        connection = self._connection()
        connection.request("POST", f"/control/{what}", encode(take))
        return connection

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
        connection = self._connection()
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            raw = answer.read()
            return answer.status, json.loads(raw) if raw else {}
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPSConnection:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname = False
        own = self.inner / self.role
        tls.load_verify_locations(own / "ca.crt")
        tls.load_cert_chain(own / "tls.crt", own / "tls.key")
        return http.client.HTTPSConnection(self.host, self.port, timeout=DEADLINE_S, context=tls)
