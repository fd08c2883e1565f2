"""A store from its URL, with the wrappers that it needs: the one place where they are put on."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from blobstore.files import FileStore
from blobstore.memory import MemoryStore
from blobstore.retrying import RetryingStore
from blobstore.store import BlobStore
from contracts.settings import BadSetting


def open_store(url: str, *, setting: str = "KELVIN_STORE") -> BlobStore:
    """`file:///absolute/path` (made where missing) or `memory:`. Raises `BadSetting` naming `setting`."""
    parts = urlsplit(url)
    if url == "memory:":
        return MemoryStore()
    if parts.scheme != "file" or parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise BadSetting(setting, url, "must be file:///absolute/path or memory:")
    return RetryingStore(FileStore(Path(unquote(parts.path))))
