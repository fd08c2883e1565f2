"""Credentials: the tenant `default` and its two keys, made at the first start. The database holds digests only.

The text of a key is `kv-<id>-<secret>`; it is in a file of mode 0600 that is written once, before its digest is
stored: a crash between the two is mended at the next start, from the file.
"""

import base64
import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from sqlalchemy import Connection, insert, select

from contracts.control import KeyRow, Scope
from controlplane import schema
from controlplane.store import Database

DEFAULT_TENANT: Final = "default"
_ID_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"
_ID_LENGTH: Final = 12
_KEY_TEXT: Final = re.compile(r"kv-([a-z0-9]{12})-([A-Za-z0-9_-]{43})")


class BadKeyFile(RuntimeError):
    """A key file holds something else than a key; it is never overwritten."""


class KeyPublisher(Protocol):
    """Where keys go once they are durable."""

    def publish(self, *, keys: tuple[KeyRow, ...] = ()) -> int: ...


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A key that every installation begins with."""

    file_name: str
    scopes: tuple[Scope, ...]


BOOTSTRAPS: Final = (Bootstrap("admin.key", (Scope.ADMIN,)), Bootstrap("default.key", (Scope.INFER,)))


def new_key_text() -> str:
    """A fresh key: a public id and 256 random bits."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
    secret = base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode()
    return f"kv-{key_id}-{secret}"


def key_row(text: str, tenant: str, scopes: tuple[Scope, ...]) -> KeyRow:
    """What is stored and published of a key. Raises BadKeyFile where `text` is none."""
    match = _KEY_TEXT.fullmatch(text)
    if match is None:
        raise BadKeyFile("it does not hold a key of the form kv-<id>-<secret>")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return KeyRow(key_id=match[1], secret_sha256=digest, tenant=tenant, scopes=scopes)


def ensure_key_file(path: Path) -> str:
    """The key text in `path`, made now where there was no such file. A reader sees a whole key or no file."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    text, draft = new_key_text(), path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text.encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(draft, path)  # fails where another has made it, unlike a rename
    except FileExistsError:
        return path.read_text().strip()
    finally:
        draft.unlink()
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return text


class KeyStore:
    """Owns the tables of tenants and keys."""

    def __init__(self, database: Database, publisher: KeyPublisher) -> None:
        self._database = database
        self._publisher = publisher

    async def bootstrap(self, data: Path, now_s: int) -> None:
        """Make the default tenant and its keys where they are missing, and publish all keys.

        A key whose file was removed after the first start stays valid and is not made anew. Raises BadKeyFile.
        """
        present = await self._database.read(_load)
        missing = [each for each in BOOTSTRAPS if all(row.scopes != each.scopes for row in present)]
        made: list[KeyRow] = []
        for each in missing:
            path = data / each.file_name
            try:
                made.append(key_row(ensure_key_file(path), DEFAULT_TENANT, each.scopes))
            except BadKeyFile as error:
                raise BadKeyFile(f"{path}: {error}") from None
        if made:
            await self._database.write(lambda connection: _insert(connection, made, now_s))
        self._publisher.publish(keys=(*present, *made))


def _load(connection: Connection) -> list[KeyRow]:
    return [
        KeyRow(
            key_id=row["key_id"],
            secret_sha256=row["secret_sha256"],
            tenant=row["tenant"],
            scopes=tuple(Scope(scope) for scope in row["scopes"].split()),
        )
        for row in connection.execute(select(schema.keys).order_by(schema.keys.c.key_id)).mappings()
    ]


def _insert(connection: Connection, rows: list[KeyRow], now_s: int) -> None:
    tenants = schema.tenants
    if connection.execute(select(tenants).where(tenants.c.tenant == DEFAULT_TENANT)).first() is None:
        connection.execute(insert(tenants).values(tenant=DEFAULT_TENANT, created_at_s=now_s))
    for row in rows:
        scopes = " ".join(row.scopes)
        connection.execute(
            insert(schema.keys).values(
                key_id=row.key_id, tenant=row.tenant, secret_sha256=row.secret_sha256, scopes=scopes, created_at_s=now_s
            )
        )
