"""Open a store from its URL, with the wrappers that it needs. Only this module adds wrappers."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

from kelvin.blobstore.blob_store import BlobStore, BlobUnavailable, StoreFull
from kelvin.blobstore.file_store import FileStore
from kelvin.blobstore.memory_store import MemoryStore
from kelvin.blobstore.retrying_store import Retry, RetryingStore
from kelvin.blobstore.s3_location import CONNECTIONS, SETTING, parse_s3_url
from kelvin.contracts.setting_parser import BadSetting

if TYPE_CHECKING:
    from kelvin.blobstore.s3_store import S3Store

log = logging.getLogger(__name__)


def open_store(url: str, *, writes: bool = True) -> BlobStore:
    """Open `file:///absolute/path` (created if missing), `s3://bucket/prefix` or `memory:`. Does not call S3 yet.

    A process that `writes` removes leftovers of crashed puts from a directory. Raises `BadSetting`, also for a
    directory that can't be used, and OSError if the disk fails.
    """
    if url == "memory:":
        return MemoryStore()
    directory = directory_of(url)
    if directory is None:
        return RetryingStore(_s3(url))
    try:
        return RetryingStore(FileStore(directory, writes=writes))
    except (NotADirectoryError, PermissionError) as error:
        raise BadSetting(SETTING, url, f"must be a directory that can be used: {error.strerror}") from error


def directory_of(url: str) -> Path | None:
    """Return the directory of a `file:` store, None for another kind. Raises `BadSetting` if the URL names no store.
    The error has no part of the URL that may be secret.
    """
    parts = _split(url)
    if url == "memory:" or parts.scheme == "s3":
        return None
    path = unquote(parts.path)
    is_plain = not (parts.netloc or parts.query or parts.fragment or "\0" in path)
    if parts.scheme != "file" or not path.startswith("/") or not is_plain:
        shown = url if is_plain and "@" not in url else f"{parts.scheme}:…"
        raise BadSetting(SETTING, shown, "must be file:///absolute/path, s3://bucket/prefix or memory:")
    return Path(path)


@asynccontextmanager
async def open_checked_store(url: str, *, writes: bool, connections: int = CONNECTIONS) -> AsyncIterator[BlobStore]:
    """Open a store for the block, after a check that it can be used. A store that does not answer is opened as well.

    A process that `writes` also needs conditional puts, and removes leftovers. `connections` applies if the URL has
    none. Raises `BadSetting` if directory, bucket, credentials or endpoint can never work.
    """
    if _split(url).scheme != "s3":
        yield open_store(url, writes=writes)
        return
    inner = _s3(url, connections)
    clearing: asyncio.Task[None] | None = None
    try:
        await _check(inner, writes=writes)
        if writes:
            clearing = asyncio.create_task(_clear(inner), name="leftovers of uploads")
        yield RetryingStore(inner)
    finally:
        if clearing is not None:
            clearing.cancel()
            await asyncio.gather(clearing, return_exceptions=True)
        await inner.close()


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # brackets that don't match, characters that normalise to a delimiter
        raise BadSetting(SETTING, "(not shown)", "is no URL") from None


def _s3(url: str, connections: int = CONNECTIONS) -> "S3Store":
    """Make the S3 store. boto3 is imported only here: it costs 0.25 s and 30 MB, which other stores never pay."""
    place = parse_s3_url(url, connections=connections)
    try:
        from kelvin.blobstore.s3_client import make_client
        from kelvin.blobstore.s3_store import S3Store
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("boto3", "botocore"):
            raise
        rule = "S3 needs boto3: install the extra, as in pip install 'kelvin-serving[s3]'"
        raise BadSetting(SETTING, str(place), rule) from error
    try:
        return S3Store(place, make_client(place))
    except BlobUnavailable as unavailable:
        raise BadSetting(SETTING, str(place), unavailable.reason) from unavailable


async def _check(store: "S3Store", *, writes: bool) -> None:
    retry = Retry()
    try:
        if (fault := await retry(lambda: store.find_fault(writes=writes))) is not None:
            raise BadSetting(SETTING, str(store.location), fault)
    except BlobUnavailable as unavailable:
        log.warning("the store does not answer yet", extra={"store": str(store.location), "reason": unavailable.reason})


async def _clear(store: "S3Store") -> None:
    try:
        if count := await store.uploads.abort_leftovers():
            log.info("aborted uploads that were left behind", extra={"uploads": count})
    except (BlobUnavailable, StoreFull) as error:
        log.warning("leftovers of uploads could not be aborted", extra={"reason": error.reason})
