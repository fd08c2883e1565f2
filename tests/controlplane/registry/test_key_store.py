"""Keys are created once and stored as digests. A crash between the key file and its row is repaired."""

import hashlib
import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import event, insert

from controlplane.audit.audit_rows import Actor
from controlplane.db import schema
from controlplane.registry.key_files import BadKeyFile, ensure_key_file, new_key_text, parse_key_text
from controlplane.registry.key_store import DEFAULT_TENANT, MAX_ENDED_KEYS, KeyStore
from controlplane.registry.policy.access import KeySpec
from kelvin.contracts.serving.control_messages import KeyRow, Scope
from tests.controlplane.builders import NOW_S, World


async def _start(data: Path) -> tuple[KeyRow, ...]:
    """Run a control plane's first steps. Return the keys that it publishes."""
    with closing(World(data)) as world:
        await world.load()
        return world.feed.snapshot().keys


async def test_the_first_start_makes_two_keys(tmp_path: Path) -> None:
    """One key can infer, the other administer and operate. Files have mode 0600, and the database has only digests."""
    rows = await _start(tmp_path)
    assert {row.scopes for row in rows} == {(Scope.ADMIN, Scope.OPERATOR), (Scope.INFER,)}
    for name, scope in (("admin.key", Scope.ADMIN), ("default.key", Scope.INFER)):
        text = (tmp_path / name).read_text().strip()
        row = next(row for row in rows if scope in row.scopes)
        assert text.split("-")[1] == row.key_id
        assert row.secret_sha256 == hashlib.sha256(text.encode()).hexdigest()
        assert row.tenant == "default"
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        assert text.encode() not in b"".join(path.read_bytes() for path in tmp_path.glob("kelvin.db*"))


async def test_second_start_makes_no_keys(tmp_path: Path) -> None:
    """Files and rows stay as they are, even if a key file was moved away."""
    before = await _start(tmp_path)
    (tmp_path / "admin.key").unlink()
    assert set(await _start(tmp_path)) == set(before)
    assert not (tmp_path / "admin.key").exists()


async def test_a_crash_between_file_and_database_is_mended(tmp_path: Path) -> None:
    """The key in the file becomes valid at the next start. A user may have read it, so it is never replaced."""
    text = ensure_key_file(tmp_path / "admin.key")
    rows = await _start(tmp_path)
    assert (tmp_path / "admin.key").read_text().strip() == text
    assert hashlib.sha256(text.encode()).hexdigest() in {row.secret_sha256 for row in rows}


async def test_a_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    """The start fails, and the message names the file."""
    (tmp_path / "admin.key").write_text("dear diary")
    with pytest.raises(BadKeyFile, match=r"admin\.key: it does not hold a key"):
        await _start(tmp_path)
    assert (tmp_path / "admin.key").read_text() == "dear diary"


@pytest.mark.parametrize("content", [b"", bytes(60), b"kv-abc"])
async def test_damaged_key_file_is_named_in_the_log(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The key stays valid whatever happens to its file, and no new key is created."""
    await _start(tmp_path)
    (tmp_path / "admin.key").write_bytes(content)
    before = await _start(tmp_path)
    assert len(before) == 2
    assert [record.__dict__["file"] for record in caplog.records if "damaged" in record.message] == ["admin.key"]
    assert (tmp_path / "admin.key").read_bytes() == content


def test_no_reader_sees_half_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash during the write leaves no file of that name."""

    def crash(*_: object) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="power cut"):
        ensure_key_file(tmp_path / "admin.key")
    assert not (tmp_path / "admin.key").exists()
    monkeypatch.undo()
    assert ensure_key_file(tmp_path / "admin.key") == (tmp_path / "admin.key").read_text().strip()


def test_keys_have_the_promised_form() -> None:
    """Keys have the form `kv-<12>-<43>` and are unique. Any other text is refused."""
    texts = {new_key_text() for _ in range(100)}
    assert len(texts) == 100
    for text in texts:
        assert parse_key_text(text) == (text[3:15], hashlib.sha256(text.encode()).hexdigest())
        assert len(text) == 3 + 12 + 1 + 43
    for broken in ("", "kv-short-x", next(iter(texts))[:-1], next(iter(texts)) + "A", next(iter(texts)).upper()):
        with pytest.raises(BadKeyFile):
            parse_key_text(broken)


async def test_ended_keys_cost_no_change_anything(tmp_path: Path) -> None:
    """A tenant may have any number of ended keys. Changes run on the one writer thread, so they must not read those
    rows. A list reads only the rows that it shows.
    """
    by = Actor(key_id="k", tenant=DEFAULT_TENANT, scopes=(Scope.ADMIN, Scope.OPERATOR))
    ended = [
        {"key_id": f"ended{number:07}", "tenant": tenant, "name": "old", "secret_sha256": "0" * 64, "scopes": "infer",
         "models": "", "created_at_s": NOW_S - 9, "expires_at_s": NOW_S - number % 2, "revoked_at_s": revoked_at_s}
        for number, (tenant, revoked_at_s) in enumerate([("acme", None), ("acme", 1), (DEFAULT_TENANT, 1)] * 300)
    ]  # fmt: skip
    rows = list[object]()

    async def read(store: KeyStore) -> list[int]:
        """Return how many rows each call reads."""
        counts, before = list[int](), 0
        grant = KeySpec("ci", (Scope.INFER,))
        key, _ = await store.create(by, "acme", grant, None, NOW_S)
        counts.append(len(rows))
        key, _, _ = await store.rotate(by, "acme", key.key_id, 0, NOW_S)
        counts.append(len(rows))
        await store.revoke(by, "acme", key.key_id, NOW_S)
        counts.append(len(rows))
        listed = await store.tenant_keys("acme", NOW_S)
        counts.append(len(rows))
        assert len(listed) == MAX_ENDED_KEYS
        assert [key.created_at_s for key in listed[:3]] == [NOW_S, NOW_S, NOW_S - 9], "the newest first"
        for number, count in enumerate(counts):
            counts[number], before = count - before, count
        return counts

    def counted(_: sqlite3.Cursor, row: tuple[object, ...]) -> tuple[object, ...]:
        rows.append(row)
        return row

    def count(driver: sqlite3.Connection, _: object) -> None:
        driver.row_factory = counted

    with closing(World(tmp_path)) as world:
        await world.load()
        await world.tenants.create(by, "acme", NOW_S)
        await world.database.write(lambda connection: connection.execute(insert(schema.keys), ended))
        world.database.engine.dispose()
        event.listen(world.database.engine, "connect", count)
        *changes, listing = await read(world.keys)
    assert max(changes) < 50
    assert listing < MAX_ENDED_KEYS + 50
