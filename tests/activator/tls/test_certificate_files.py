"""Server certificates from files: chosen by name, and reloaded while connections continue."""

import asyncio
import datetime
import errno
import os
import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509

from activator.tls.certificate_authority import CA_DAYS, LEAF_DAYS, CertificateAuthority
from activator.tls.certificate_files import BadCertificate, CertificateFiles
from activator.tls.server_certificates import ServerCertificates
from kelvin.telemetry.telemetry import CERTIFICATE_EXPIRY_METRIC
from tests.activator.tls.foreign_authority import Issuer
from tests.activator.tls.handshakes import handshake
from tests.activator.world import ActivatorWorld, world

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    """A foreign certificate authority."""
    return Issuer()


def _serial(tls: ssl.SSLObject) -> int:
    shown = tls.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def _shown(certificates: ServerCertificates, name: str) -> int:
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return _serial(handshake(client, certificates.listener, name))


def test_certificate_is_chosen_by_name(tmp_path: Path, issuer: Issuer) -> None:
    """An exact name comes first, then a wildcard of one label. Other names get the activator's own certificate."""
    place = tmp_path / "from"
    exact = issuer.pair(place / "a", "models.example.com", "www.example.com")
    beside = issuer.pair(place / "b", "*.example.com", acme=True)
    own = ServerCertificates(
        CertificateAuthority.load_or_make(tmp_path / "ca.pem", tmp_path / "ca.key"), "d.e", CertificateFiles(place)
    )
    ours = _shown(own, "localhost")
    for name, want in (
        ("models.example.com", exact), ("WWW.Example.COM", exact), ("other.example.com", beside),
        ("a.b.example.com", ours), ("example.com", ours), ("m.t.d.e", ours),
    ):  # fmt: skip
        assert _shown(own, name) == want, name
    assert len({exact, beside, ours}) == 3


async def test_changed_pair_is_reloaded_and_broken_pair_is_ignored(tmp_path: Path, issuer: Issuer) -> None:
    """Half a renewal, or a missing directory, keeps the previous certificate. The other half activates the new one."""

    place = tmp_path / "from"
    first = issuer.pair(place, "a.b")
    files = CertificateFiles(place)
    own = ServerCertificates(CertificateAuthority.load_or_make(tmp_path / "ca.pem", tmp_path / "ca.key"), "d.e", files)
    second = issuer.pair(tmp_path / "next", "a.b")
    os.replace(tmp_path / "next" / "tls.crt", place / "tls.crt")
    await files.reload_if_changed()
    assert _shown(own, "a.b") == first, "its key has not arrived"
    os.replace(tmp_path / "next" / "tls.key", place / "tls.key")
    await files.reload_if_changed()
    assert _shown(own, "a.b") == second
    (place / "tls.crt").write_bytes(b"")
    await files.reload_if_changed()
    assert _shown(own, "a.b") == second
    third = issuer.pair(place, "a.b")
    await files.reload_if_changed()
    assert _shown(own, "a.b") == third
    place.rename(tmp_path / "gone")
    await files.reload_if_changed()
    assert _shown(own, "a.b") == third
    (tmp_path / "gone").rename(place)
    issuer.pair(place / "more", "c.d")
    await files.reload_if_changed()
    assert repr(files).endswith("names=2>")


def _own(tmp_path: Path, files: CertificateFiles) -> ServerCertificates:
    return ServerCertificates(CertificateAuthority.load_or_make(tmp_path / "ca.pem", tmp_path / "ca.key"), "d.e", files)


async def test_valid_pair_is_shown_before_an_expired_or_a_future_one(tmp_path: Path, issuer: Issuer) -> None:
    """Of several pairs for a name a valid one is chosen, from any directory. Of two valid ones the newest."""
    place = tmp_path / "from"
    issuer.pair(place / "a", "x.y", days=-1, begins_in_days=-9)
    good = issuer.pair(place / "b", "x.y", begins_in_days=-5)
    issuer.pair(place / "c", "x.y", days=90, begins_in_days=60)
    issuer.pair(place / "d", "z.y", days=-1, begins_in_days=-9)
    beside = issuer.pair(place / "e", "*.y")
    files = CertificateFiles(place)
    own = _own(tmp_path, files)
    assert _shown(own, "x.y") == good
    assert _shown(own, "z.y") == beside, "the exact pair has expired"
    latest = issuer.pair(place / "0", "x.y", begins_in_days=-2)
    await files.reload_if_changed()
    assert _shown(own, "x.y") == latest
    expired = issuer.pair(tmp_path / "only" / "a", "x.y", days=-1, begins_in_days=-9)
    assert _shown(_own(tmp_path, CertificateFiles(tmp_path / "only")), "x.y") == expired, "the only pair is expired"


def test_pair_becomes_valid_while_nothing_changes(tmp_path: Path, issuer: Issuer) -> None:
    """The clock is checked at each handshake, so no file has to change."""
    now = [datetime.datetime.now(datetime.UTC)]
    first = issuer.pair(tmp_path / "from" / "a", "x.y", days=5)
    second = issuer.pair(tmp_path / "from" / "b", "x.y", days=60, begins_in_days=3)
    files = CertificateFiles(tmp_path / "from", now=lambda: now[0])
    own = _own(tmp_path, files)
    assert _shown(own, "x.y") == first
    assert round((files.earliest_expiry - now[0]).total_seconds() / 86_400) == 5
    now[0] += datetime.timedelta(days=4)
    assert _shown(own, "x.y") == second
    assert round((files.earliest_expiry - now[0]).total_seconds() / 86_400) == 56


@pytest.mark.parametrize("harm", ["no key", "an extension twice", "no certificate", "no names"])
async def test_broken_pair_stops_no_other(
    tmp_path: Path, issuer: Issuer, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It affects neither the start nor the renewal of others. It is logged once, and used once it is complete."""

    def broken(place: Path) -> None:
        issuer.pair(place, "b.b", repeats_names=harm == "an extension twice")
        if harm == "no key":
            (place / "tls.key").unlink()
        if harm == "no certificate":
            (place / "tls.crt").write_text("none")
        if harm == "no names":
            (place / "tls.crt").write_bytes(issuer.root)

    place = tmp_path / "from"
    broken(place / "a")
    first = issuer.pair(place / "b", "c.c")
    files = CertificateFiles(place)
    own = _own(tmp_path, files)
    assert _shown(own, "c.c") == first
    second = issuer.pair(place / "b", "c.c")
    await files.reload_if_changed()
    await files.reload_if_changed()
    assert _shown(own, "c.c") == second
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    mended = issuer.pair(place / "a", "b.b")
    await files.reload_if_changed()
    assert _shown(own, "b.b") == mended
    broken(place / "a")
    await files.reload_if_changed()
    assert _shown(own, "b.b") == mended, "it stays as it was"


def test_a_directory_of_another_user_stops_no_pair(
    tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount has a `lost+found` that only root may read."""
    first = issuer.pair(tmp_path / "from", "c.c")
    (tmp_path / "from" / "lost+found").mkdir()
    stat = Path.stat

    def refusing(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.parent.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", refusing)
    files = CertificateFiles(tmp_path / "from")
    assert _shown(_own(tmp_path, files), "c.c") == first


async def test_failed_read_of_certificates_is_tried_again(
    tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor was left, for example. The files are unchanged, and a later check reads them."""
    place = tmp_path / "from"
    issuer.pair(place, "a.b")
    files = CertificateFiles(place)
    own = _own(tmp_path, files)
    second = issuer.pair(place, "a.b")

    def fail(*_: object) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        await files.reload_if_changed()
    assert _shown(own, "a.b") != second
    await files.reload_if_changed()
    assert _shown(own, "a.b") == second


@pytest.mark.parametrize("case", ["nowhere", "empty", "no key", "another's key", "no certificate"])
def test_start_without_a_usable_certificate_is_refused(tmp_path: Path, issuer: Issuer, case: str) -> None:
    """The error names the path."""
    place = tmp_path / "from"
    if case != "nowhere":
        place.mkdir()
    if case in ("no key", "another's key", "no certificate"):
        issuer.pair(place, "a.b")
    if case == "no key":
        (place / "tls.key").unlink()
    if case == "another's key":
        issuer.pair(tmp_path / "other", "a.b")
        os.replace(tmp_path / "other" / "tls.key", place / "tls.key")
    if case == "no certificate":
        (place / "tls.crt").write_text("none")
    with pytest.raises(BadCertificate, match=str(place)):
        CertificateFiles(place)


async def test_certificate_changes_under_open_connections(tmp_path: Path, issuer: Issuer) -> None:
    """16 connections continue with their certificate. Later ones get the new one."""
    place = tmp_path / "from"
    old = issuer.pair(place, "localhost")
    (tmp_path / "world").mkdir()

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))

    async def connect(here: ActivatorWorld) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = issuer.client()
        return await asyncio.open_connection("127.0.0.1", here.port, ssl=tls, server_hostname="localhost")

    async with world(tmp_path / "world", certificates=place) as here:
        kept = [await connect(here) for _ in range(16)]
        new = issuer.pair(place, "localhost")
        async with asyncio.timeout(30):
            while True:
                for reader, writer in kept:
                    await ask(reader, writer)
                _, late = await connect(here)
                shown = _serial(late.get_extra_info("ssl_object"))
                late.transport.abort()
                if shown == new:
                    break
                assert shown == old
        for reader, writer in kept:
            await ask(reader, writer)
            assert _serial(writer.get_extra_info("ssl_object")) == old
            writer.transport.abort()


async def test_certificate_expiry_is_reported(tmp_path: Path, issuer: Issuer) -> None:
    """The earliest expiry of the files is reported beside the activator's own. A renewal shows without a restart."""
    place = tmp_path / "from"
    issuer.pair(place / "a", "localhost", days=90)
    issuer.pair(place / "b", "other.example.com", days=7)
    (tmp_path / "world").mkdir()

    async def days(here: ActivatorWorld) -> dict[str, int]:
        return {
            labels["of"]: round((at_s - time.time()) / 86_400)
            for labels, at_s in await here.series(CERTIFICATE_EXPIRY_METRIC)
        }

    async with world(tmp_path / "world", certificates=place) as here:
        assert await days(here) == {"authority": CA_DAYS, "leaves": LEAF_DAYS, "files": 7}
        issuer.pair(place / "b", "other.example.com", days=200)
        async with asyncio.timeout(30):
            while (await days(here))["files"] != 90:
                await asyncio.sleep(0.05)
