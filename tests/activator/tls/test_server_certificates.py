"""Whoever asks is shown a leaf in its first half of life, for the name that was asked for."""

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


def _made(tmp_path: Path, clock: _Clock) -> tuple[ServerCertificates, ssl.SSLContext]:
    authority = CertificateAuthority.load_or_make(tmp_path / "ca.pem", tmp_path / "tls" / "ca.key", clock)
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE  # its clock is not ours
    return ServerCertificates(authority, "d.e"), client


def _shown(certificates: ServerCertificates, client: ssl.SSLContext, name: str | None) -> bytes:
    shown = handshake(client, certificates.listener, name).getpeercert(binary_form=True)
    assert shown is not None
    return shown


@pytest.mark.parametrize("age", [pytest.param(HALF - DAY, id="young: the control"), pytest.param(HALF + DAY, id="due")])
async def test_leaves_are_renewed(tmp_path: Path, age: datetime.timedelta) -> None:
    """Past half of its life a leaf is replaced, the default and a tenant's alike, behind the same listener."""
    clock = _Clock()
    certificates, client = _made(tmp_path, clock)
    names = ("localhost", None, "m.t.d.e")
    await certificates.ensure(frozenset({"t"}))
    before = [_shown(certificates, client, name) for name in names]
    clock.at += age
    await certificates.ensure(frozenset({"t"}))
    after = [_shown(certificates, client, name) for name in names]
    assert [old == new for old, new in zip(before, after, strict=True)] == [age < HALF] * 3


@pytest.mark.parametrize(
    "ahead", [pytest.param(DAY, id="a day ahead"), pytest.param(datetime.timedelta(days=5000), id="years ahead")]
)
async def test_what_a_clock_ahead_has_made_is_made_again(tmp_path: Path, ahead: datetime.timedelta) -> None:
    """CA and leaves begin in the future. Once the clock is right, callers are shown what they can verify."""
    clock = _Clock()
    clock.at += ahead
    certificates, _ = _made(tmp_path, clock)
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
    """Commands on this machine reach it there, if it is not at localhost."""
    authority = CertificateAuthority.load_or_make(tmp_path / "ca.pem", tmp_path / "ca.key")
    certificates = ServerCertificates(authority, "d.e", host=host)
    for name in ("localhost", "127.0.0.1", "::1", *more):
        strict = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        assert handshake(strict, certificates.listener, name).getpeercert()


async def test_a_tenant_that_is_gone_has_no_leaf(tmp_path: Path) -> None:
    """Its names get the default one."""
    certificates, client = _made(tmp_path, _Clock())
    await certificates.ensure(frozenset({"t", "u"}))
    await certificates.ensure(frozenset({"u"}))
    default = _shown(certificates, client, "localhost")
    assert _shown(certificates, client, "m.t.d.e") == default
    assert _shown(certificates, client, "m.u.d.e") != default


async def test_who_asks_before_a_new_tenants_leaf_was_made_gets_it(tmp_path: Path) -> None:
    """Its model may be asked for as soon as it is known. The control: of a stranger nothing is made."""
    certificates, client = _made(tmp_path, _Clock())
    tenants: set[str] = set()

    following = asyncio.create_task(certificates.follow(lambda: frozenset(tenants), asyncio.Event()))
    await asyncio.sleep(0)  # it waits for news, which never come
    tenants.add("t")
    default = _shown(certificates, client, "localhost")
    leaf = _shown(certificates, client, "m.t.d.e")
    assert leaf != default
    assert _shown(certificates, client, "m.t.d.e") == leaf
    assert _shown(certificates, client, "m.stranger.d.e") == default
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_certificate_that_cannot_be_made_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends nothing: until then its names get the default one."""
    certificates, client = _made(tmp_path, _Clock())
    default = _shown(certificates, client, "m.t.d.e")
    made, failed = CertificateAuthority.context, threading.Event()

    def fail(authority: CertificateAuthority, names: list[str], addresses: list[str]) -> ssl.SSLContext:
        failed.set()
        raise OSError(27, "File too large")

    changed = asyncio.Event()
    monkeypatch.setattr(CertificateAuthority, "context", fail)
    following = asyncio.create_task(certificates.follow(lambda: frozenset({"t"}), changed, 0.01))
    changed.set()
    async with asyncio.timeout(30):
        await eventually(failed.is_set)
        assert _shown(certificates, client, "m.t.d.e") == default
        monkeypatch.setattr(CertificateAuthority, "context", made)
        while repr(certificates) != "<ServerCertificates d.e tenants=1>":
            assert not following.done()
            await asyncio.sleep(0.01)
    following.cancel()
    assert _shown(certificates, client, "m.t.d.e") != default


async def test_follower_ends_where_tenants_change_in_the_same_round(tmp_path: Path) -> None:
    """A cancellation is not lost where what is waited for comes with it."""

    certificates, _ = _made(tmp_path, _Clock())
    changed = asyncio.Event()
    following = asyncio.create_task(certificates.follow(frozenset, changed))
    for _ in range(5):  # rounds of the event loop, until it waits
        await asyncio.sleep(0)
    changed.set()
    following.cancel()
    await asyncio.wait((following,), timeout=5)
    assert following.cancelled()
