"""The front door's certificates: one default and one per tenant, chosen by the name that the client requests (SNI).

They are leaf certificates of the local CA, except for names that have files (`certificate_files.py`). A leaf is made
when its tenant appears in the feed, or on its first request. It is made again at half of its lifetime, because a
process may run for years.
"""

import asyncio
import datetime
import ipaddress
import logging
import ssl
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from activator.tls.certificate_authority import BACKDATED, LEAF_DAYS, CertificateAuthority
from activator.tls.certificate_files import CertificateFiles

MAX_TENANTS: Final = 10_000
RENEW_AFTER: Final = datetime.timedelta(days=LEAF_DAYS) / 2
CHECK_S: Final = 60.0  # interval of date checks: the clock may have been corrected
RETRY_S: Final = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _IssuedContext:
    context: ssl.SSLContext
    issued_at: datetime.datetime


class ServerCertificates:
    """The listener's TLS context, and the contexts of tenants. Use from one event loop."""

    def __init__(
        self,
        authority: CertificateAuthority,
        domain: str,
        files: CertificateFiles | None = None,
        host: str = "localhost",
    ) -> None:
        """`host` is the listener's address. The default leaf includes it."""
        self._authority = authority
        self._host = host
        self._domain = domain
        self._files = files
        self._by_tenant: dict[str, _IssuedContext] = {}
        self._tenants: Callable[[], AbstractSet[str]] = frozenset
        self._default = self._make(None)
        self.listener = self._default.context
        self.listener.sni_callback = self._choose

    def __repr__(self) -> str:
        return f"<ServerCertificates {self._domain} tenants={len(self._by_tenant)}>"

    def expiries(self) -> dict[str, datetime.datetime]:
        """Return the earliest expiry of the `authority`, its `leaves`, and the `files`."""
        oldest = min(issued.issued_at for issued in (self._default, *self._by_tenant.values()))
        expiries = {
            "authority": self._authority.certificate.not_valid_after_utc,
            "leaves": oldest + datetime.timedelta(days=LEAF_DAYS),
        }
        return expiries if self._files is None else {**expiries, "files": self._files.earliest_expiry}

    async def ensure(self, tenants: AbstractSet[str]) -> None:
        """Make missing and old leaves for these tenants, at most MAX_TENANTS, and drop those of others. Afterwards each
        is in the first half of its lifetime. Idempotent. Safe to cancel.
        """
        await asyncio.to_thread(self._authority.renew_if_due)
        for gone in self._by_tenant.keys() - tenants:
            del self._by_tenant[gone]
        if self._is_due(self._default):
            self._default = await asyncio.to_thread(self._make, None)
        for tenant in sorted(tenants):
            issued = self._by_tenant.get(tenant)
            if self._is_due(issued) and (issued is not None or len(self._by_tenant) < MAX_TENANTS):
                self._by_tenant[tenant] = await asyncio.to_thread(self._make, tenant)

    async def run(
        self, tenants: Callable[[], AbstractSet[str]], changed: asyncio.Event, retry_s: float = RETRY_S
    ) -> None:
        """Make missing and due leaves of `tenants()` when `changed` is set and every CHECK_S, until cancelled. If
        one can't be made, its names get an existing one, and it is tried again after `retry_s`.
        """
        self._tenants = tenants
        pause_s = CHECK_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await changed.wait()
            changed.clear()
            try:
                await self.ensure(tenants())
                pause_s = CHECK_S
            except (OSError, ValueError) as error:  # out of memory, or OpenSSL rejects a key
                log.error("a certificate can't be made", extra={"error": str(error)})
                pause_s = retry_s

    def _is_due(self, issued: _IssuedContext | None) -> bool:
        """Return whether it must be made: it is missing, old, or not valid yet because the clock was ahead."""
        return issued is None or not -BACKDATED <= self._authority.now() - issued.issued_at <= RENEW_AFTER

    def _make(self, tenant: str | None) -> _IssuedContext:
        now = self._authority.now()
        if tenant is None:
            context = self._authority.issue_context(*_names_of(self._host))
        else:
            context = self._authority.issue_context([f"*.{tenant}.{self._domain}"], [])
        return _IssuedContext(context, now)

    def _choose(self, tls: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
        """Set the context: of a file, else the tenant's leaf for MODEL.TENANT.DOMAIN, else the default."""
        name = (name or "").lower()
        if self._files is not None and (file_context := self._files.find_context(name)) is not None:
            tls.context = file_context
            return
        prefix = name.removesuffix("." + self._domain)
        issued = self._leaf(prefix.rpartition(".")[2]) if prefix != name and prefix.count(".") == 1 else None
        tls.context = (issued or self._default).context

    def _leaf(self, tenant: str) -> _IssuedContext | None:
        """Return the tenant's leaf. For a new tenant it is made here, which blocks for a few milliseconds once."""
        issued = self._by_tenant.get(tenant)
        if issued is None and len(self._by_tenant) < MAX_TENANTS and tenant in self._tenants():
            with suppress(OSError, ValueError):  # `run` logs the failure
                issued = self._by_tenant[tenant] = self._make(tenant)
        return issued


def _names_of(host: str) -> tuple[list[str], list[str]]:
    """Return the DNS names and IP addresses of the default leaf: those of this machine, and the listener's."""
    names, addresses = ["localhost"], ["127.0.0.1", "::1"]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        names += [host] if host.isascii() and host not in names else []
    else:
        addresses += [str(address)] if not address.is_unspecified and str(address) not in addresses else []
    return names, addresses
