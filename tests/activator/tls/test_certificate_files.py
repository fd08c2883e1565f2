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
    served = tls.getpeercert(binary_form=True)
    assert served is not None
    return x509.load_der_x509_certificate(served).serial_number


def _served_serial(certificates: ServerCertificates, name: str) -> int:
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return _serial(handshake(client, certificates.listener, name))


def test_certificate_is_chosen_by_name(tmp_path: Path, issuer: Issuer) -> None:
    """An exact name comes first, then a wildcard of one label. Other names get the activator's own certificate."""
    directory = tmp_path / "from"
    exact = issuer.pair(directory / "a", "models.example.com", "www.example.com")
    wildcard = issuer.pair(directory / "b", "*.example.com", acme=True)
    certificates = ServerCertificates(
        CertificateAuthority.load_or_make(tmp_path / "ca.pem", tmp_path / "ca.key"), "d.e", CertificateFiles(directory)
    )
    own_serial = _served_serial(certificates, "localhost")
    for name, want in (
        ("models.example.com", exact), ("WWW.Example.COM", exact), ("other.example.com", wildcard),
        ("a.b.example.com", own_serial), ("example.com", own_serial), ("m.t.d.e", own_serial),
    ):  # fmt: skip
        assert _served_serial(certificates, name) == want, name
    assert len({exact, wildcard, own_serial}) == 3


async def test_changed_pair_is_reloaded_and_broken_pair_is_ignored(tmp_path: Path, issuer: Issuer) -> None:
    """Half a renewal, or a missing directory, keeps the previous certificate. The other half activates the new one."""

    directory = tmp_path / "from"
    first = issuer.pair(directory, "a.b")
    files = CertificateFiles(directory)
    certificates = ServerCertificates(
        CertificateAuthority.load_or_make(tmp_path / "ca.pem", tmp_path / "ca.key"), "d.e", files
    )
    second = issuer.pair(tmp_path / "next", "a.b")
    os.replace(tmp_path / "next" / "tls.crt", directory / "tls.crt")
    await files.reload_if_changed()
    assert _served_serial(certificates, "a.b") == first, "its key has not arrived"
    os.replace(tmp_path / "next" / "tls.key", directory / "tls.key")
    await files.reload_if_changed()
    assert _served_serial(certificates, "a.b") == second
    (directory / "tls.crt").write_bytes(b"")
    await files.reload_if_changed()
    assert _served_serial(certificates, "a.b") == second
    third = issuer.pair(directory, "a.b")
    await files.reload_if_changed()
    assert _served_serial(certificates, "a.b") == third
    directory.rename(tmp_path / "gone")
    await files.reload_if_changed()
    assert _served_serial(certificates, "a.b") == third
    (tmp_path / "gone").rename(directory)
    issuer.pair(directory / "more", "c.d")
    await files.reload_if_changed()
    assert repr(files).endswith("names=2>")


def _server_certificates(tmp_path: Path, files: CertificateFiles) -> ServerCertificates:
    return ServerCertificates(CertificateAuthority.load_or_make(tmp_path / "ca.pem", tmp_path / "ca.key"), "d.e", files)


async def test_valid_pair_is_shown_before_an_expired_or_a_future_one(tmp_path: Path, issuer: Issuer) -> None:
    """Of several pairs for a name a valid one is chosen, from any directory. Of two valid ones the newest."""
    directory = tmp_path / "from"
    issuer.pair(directory / "a", "x.y", days=-1, begins_in_days=-9)
    good = issuer.pair(directory / "b", "x.y", begins_in_days=-5)
    issuer.pair(directory / "c", "x.y", days=90, begins_in_days=60)
    issuer.pair(directory / "d", "z.y", days=-1, begins_in_days=-9)
    wildcard = issuer.pair(directory / "e", "*.y")
    files = CertificateFiles(directory)
    certificates = _server_certificates(tmp_path, files)
    assert _served_serial(certificates, "x.y") == good
    assert _served_serial(certificates, "z.y") == wildcard, "the exact pair has expired"
    latest = issuer.pair(directory / "0", "x.y", begins_in_days=-2)
    await files.reload_if_changed()
    assert _served_serial(certificates, "x.y") == latest
    expired = issuer.pair(tmp_path / "only" / "a", "x.y", days=-1, begins_in_days=-9)
    assert _served_serial(_server_certificates(tmp_path, CertificateFiles(tmp_path / "only")), "x.y") == expired, (
        "the only pair is expired"
    )


def test_pair_becomes_valid_while_nothing_changes(tmp_path: Path, issuer: Issuer) -> None:
    """The clock is checked at each handshake, so no file has to change."""
    now = [datetime.datetime.now(datetime.UTC)]
    first = issuer.pair(tmp_path / "from" / "a", "x.y", days=5)
    second = issuer.pair(tmp_path / "from" / "b", "x.y", days=60, begins_in_days=3)
    files = CertificateFiles(tmp_path / "from", now=lambda: now[0])
    certificates = _server_certificates(tmp_path, files)
    assert _served_serial(certificates, "x.y") == first
    assert round((files.earliest_expiry - now[0]).total_seconds() / 86_400) == 5
    now[0] += datetime.timedelta(days=4)
    assert _served_serial(certificates, "x.y") == second
    assert round((files.earliest_expiry - now[0]).total_seconds() / 86_400) == 56


@pytest.mark.parametrize("defect", ["no key", "an extension twice", "no certificate", "no names"])
async def test_broken_pair_stops_no_other(
    tmp_path: Path, issuer: Issuer, defect: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It affects neither the start nor the renewal of others. It is logged once, and used once it is complete."""

    def broken(directory: Path) -> None:
        issuer.pair(directory, "b.b", repeats_names=defect == "an extension twice")
        if defect == "no key":
            (directory / "tls.key").unlink()
        if defect == "no certificate":
            (directory / "tls.crt").write_text("none")
        if defect == "no names":
            (directory / "tls.crt").write_bytes(issuer.root)

    directory = tmp_path / "from"
    broken(directory / "a")
    first = issuer.pair(directory / "b", "c.c")
    files = CertificateFiles(directory)
    certificates = _server_certificates(tmp_path, files)
    assert _served_serial(certificates, "c.c") == first
    second = issuer.pair(directory / "b", "c.c")
    await files.reload_if_changed()
    await files.reload_if_changed()
    assert _served_serial(certificates, "c.c") == second
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    mended = issuer.pair(directory / "a", "b.b")
    await files.reload_if_changed()
    assert _served_serial(certificates, "b.b") == mended
    broken(directory / "a")
    await files.reload_if_changed()
    assert _served_serial(certificates, "b.b") == mended, "it stays as it was"


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
    assert _served_serial(_server_certificates(tmp_path, files), "c.c") == first


async def test_failed_read_of_certificates_is_tried_again(
    tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor was left, for example. The files are unchanged, and a later check reads them."""
    directory = tmp_path / "from"
    issuer.pair(directory, "a.b")
    files = CertificateFiles(directory)
    certificates = _server_certificates(tmp_path, files)
    second = issuer.pair(directory, "a.b")

    def fail(*_: object) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        await files.reload_if_changed()
    assert _served_serial(certificates, "a.b") != second
    await files.reload_if_changed()
    assert _served_serial(certificates, "a.b") == second


@pytest.mark.parametrize("case", ["nowhere", "empty", "no key", "another's key", "no certificate"])
def test_start_without_a_usable_certificate_is_refused(tmp_path: Path, issuer: Issuer, case: str) -> None:
    """The error names the path."""
    directory = tmp_path / "from"
    if case != "nowhere":
        directory.mkdir()
    if case in ("no key", "another's key", "no certificate"):
        issuer.pair(directory, "a.b")
    if case == "no key":
        (directory / "tls.key").unlink()
    if case == "another's key":
        issuer.pair(tmp_path / "other", "a.b")
        os.replace(tmp_path / "other" / "tls.key", directory / "tls.key")
    if case == "no certificate":
        (directory / "tls.crt").write_text("none")
    with pytest.raises(BadCertificate, match=str(directory)):
        CertificateFiles(directory)


async def test_certificate_changes_under_open_connections(tmp_path: Path, issuer: Issuer) -> None:
    """16 connections continue with their certificate. Later ones get the new one."""
    directory = tmp_path / "from"
    old = issuer.pair(directory, "localhost")
    (tmp_path / "world").mkdir()

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))

    async def connect(here: ActivatorWorld) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = issuer.client()
        return await asyncio.open_connection("127.0.0.1", here.port, ssl=tls, server_hostname="localhost")

    async with world(tmp_path / "world", certificates=directory) as here:
        connections = [await connect(here) for _ in range(16)]
        new = issuer.pair(directory, "localhost")
        async with asyncio.timeout(30):
            while True:
                for reader, writer in connections:
                    await ask(reader, writer)
                _, late = await connect(here)
                served = _serial(late.get_extra_info("ssl_object"))
                late.transport.abort()
                if served == new:
                    break
                assert served == old
        for reader, writer in connections:
            await ask(reader, writer)
            assert _serial(writer.get_extra_info("ssl_object")) == old
            writer.transport.abort()


async def test_certificate_expiry_is_reported(tmp_path: Path, issuer: Issuer) -> None:
    """The earliest expiry of the files is reported beside the activator's own. A renewal shows without a restart."""
    directory = tmp_path / "from"
    issuer.pair(directory / "a", "localhost", days=90)
    issuer.pair(directory / "b", "other.example.com", days=7)
    (tmp_path / "world").mkdir()

    async def days(here: ActivatorWorld) -> dict[str, int]:
        return {
            labels["of"]: round((at_s - time.time()) / 86_400)
            for labels, at_s in await here.series(CERTIFICATE_EXPIRY_METRIC)
        }

    async with world(tmp_path / "world", certificates=directory) as here:
        assert await days(here) == {"authority": CA_DAYS, "leaves": LEAF_DAYS, "files": 7}
        issuer.pair(directory / "b", "other.example.com", days=200)
        async with asyncio.timeout(30):
            while (await days(here))["files"] != 90:
                await asyncio.sleep(0.05)
