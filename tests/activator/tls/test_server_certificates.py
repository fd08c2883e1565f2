"""ServerCertificates: each name gets its own certificate, renewed at half of its life."""

import asyncio
import datetime
import ssl
import threading
from pathlib import Path

import pytest

from activator.tls.certificate_authority import LEAF_DAYS, CertificateAuthority
from activator.tls.server_certificates import ServerCertificates
from tests.activator.tls.handshakes import handshake
from tests.eventually import eventually

HALF = datetime.timedelta(days=LEAF_DAYS) / 2
DAY = datetime.timedelta(days=1)


class _Clock:
    def __init__(self) -> None:
        self.at = datetime.datetime.now(datetime.UTC)

    def __call__(self) -> datetime.datetime:
        return self.at


def _build(tmp_path: Path, clock: _Clock) -> tuple[ServerCertificates, ssl.SSLContext]:
    authority = CertificateAuthority.load_or_make(tmp_path / "ca.pem", tmp_path / "tls" / "ca.key", clock)
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE  # its clock is not the test's
    return ServerCertificates(authority, "d.e"), client


def _served_certificate(certificates: ServerCertificates, client: ssl.SSLContext, name: str | None) -> bytes:
    certificate = handshake(client, certificates.listener, name).getpeercert(binary_form=True)
    assert certificate is not None
    return certificate


@pytest.mark.parametrize("age", [pytest.param(HALF - DAY, id="control: young"), pytest.param(HALF + DAY, id="due")])
async def test_leaves_are_renewed(tmp_path: Path, age: datetime.timedelta) -> None:
    """At half of its life a certificate is replaced, both the default and a tenant's, without a new listener."""
    clock = _Clock()
    certificates, client = _build(tmp_path, clock)
    names = ("localhost", None, "m.t.d.e")
    await certificates.ensure(frozenset({"t"}))
    before = [_served_certificate(certificates, client, name) for name in names]
    clock.at += age
    await certificates.ensure(frozenset({"t"}))
    after = [_served_certificate(certificates, client, name) for name in names]
    assert [old == new for old, new in zip(before, after, strict=True)] == [age < HALF] * 3


@pytest.mark.parametrize(
    "ahead", [pytest.param(DAY, id="a day ahead"), pytest.param(datetime.timedelta(days=5000), id="years ahead")]
)
async def test_certificates_made_by_a_fast_clock_are_replaced(tmp_path: Path, ahead: datetime.timedelta) -> None:
    """The CA and leaves begin in the future. Once the clock is right, clients get certificates that they can verify."""
    clock = _Clock()
    clock.at += ahead
    certificates, _ = _build(tmp_path, clock)
    await certificates.ensure(frozenset({"t"}))
    key = (tmp_path / "tls" / "ca.key").read_bytes()
    clock.at -= ahead
    await certificates.ensure(frozenset({"t"}))
    strict = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))  # by the true clock
    for name in ("localhost", "m.t.d.e"):
        assert handshake(strict, certificates.listener, name).getpeercert()
    assert (tmp_path / "tls" / "ca.key").read_bytes() == key


@pytest.mark.parametrize(
    ("host", "more"),
    [
        pytest.param("127.0.0.2", ("127.0.0.2",), id="an address"),
        pytest.param("fd00::1", ("fd00::1",), id="an address of version 6"),
        pytest.param("door.example", ("door.example",), id="a name"),
        pytest.param("127.0.0.1", (), id="this machine"),
        pytest.param("0.0.0.0", (), id="every address"),
    ],
)
def test_default_leaf_is_for_the_listeners_address(tmp_path: Path, host: str, more: tuple[str, ...]) -> None:
    """Commands on this machine verify the listener's address, if it is not localhost."""
    authority = CertificateAuthority.load_or_make(tmp_path / "ca.pem", tmp_path / "ca.key")
    certificates = ServerCertificates(authority, "d.e", host=host)
    for name in ("localhost", "127.0.0.1", "::1", *more):
        strict = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        assert handshake(strict, certificates.listener, name).getpeercert()


async def test_a_tenant_that_is_gone_has_no_leaf(tmp_path: Path) -> None:
    """Its names get the default certificate."""
    certificates, client = _build(tmp_path, _Clock())
    await certificates.ensure(frozenset({"t", "u"}))
    await certificates.ensure(frozenset({"u"}))
    default = _served_certificate(certificates, client, "localhost")
    assert _served_certificate(certificates, client, "m.t.d.e") == default
    assert _served_certificate(certificates, client, "m.u.d.e") != default


async def test_first_handshake_of_a_new_tenant_gets_its_leaf(tmp_path: Path) -> None:
    """A new tenant's model may be called at once. Control: no certificate is made for an unknown tenant."""
    certificates, client = _build(tmp_path, _Clock())
    tenants: set[str] = set()

    following = asyncio.create_task(certificates.run(lambda: frozenset(tenants), asyncio.Event()))
    await asyncio.sleep(0)  # it waits for changes, and none come
    tenants.add("t")
    default = _served_certificate(certificates, client, "localhost")
    leaf = _served_certificate(certificates, client, "m.t.d.e")
    assert leaf != default
    assert _served_certificate(certificates, client, "m.t.d.e") == leaf
    assert _served_certificate(certificates, client, "m.stranger.d.e") == default
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_certificate_that_cannot_be_made_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure ends nothing. Until a retry succeeds, its names get the default certificate."""
    certificates, client = _build(tmp_path, _Clock())
    default = _served_certificate(certificates, client, "m.t.d.e")
    issue_context, failed = CertificateAuthority.issue_context, threading.Event()

    def fail(authority: CertificateAuthority, names: list[str], addresses: list[str]) -> ssl.SSLContext:
        failed.set()
        raise OSError(27, "File too large")

    changed = asyncio.Event()
    monkeypatch.setattr(CertificateAuthority, "issue_context", fail)
    following = asyncio.create_task(certificates.run(lambda: frozenset({"t"}), changed, 0.01))
    changed.set()
    async with asyncio.timeout(30):
        await eventually(failed.is_set)
        assert _served_certificate(certificates, client, "m.t.d.e") == default
        monkeypatch.setattr(CertificateAuthority, "issue_context", issue_context)
        while repr(certificates) != "<ServerCertificates d.e tenants=1>":
            assert not following.done()
            await asyncio.sleep(0.01)
    following.cancel()
    assert _served_certificate(certificates, client, "m.t.d.e") != default


async def test_follower_ends_when_tenants_change_at_the_same_time(tmp_path: Path) -> None:
    """The cancellation is not lost when the awaited event comes in the same loop iteration."""

    certificates, _ = _build(tmp_path, _Clock())
    changed = asyncio.Event()
    following = asyncio.create_task(certificates.run(frozenset, changed))
    for _ in range(5):  # iterations of the event loop, until it waits
        await asyncio.sleep(0)
    changed.set()
    following.cancel()
    await asyncio.wait((following,), timeout=5)
    assert following.cancelled()
