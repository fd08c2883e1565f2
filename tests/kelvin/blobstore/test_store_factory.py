"""`open_store` opens the store that a URL names, and refuses other URLs."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kelvin.blobstore.store_factory import open_store
from kelvin.contracts.setting_parser import BadSetting


def test_file_url(tmp_path: Path) -> None:
    """Two stores of one file URL see the same objects. The path may have characters that URLs escape."""
    url = (tmp_path / "a b").as_uri()
    assert asyncio.run(open_store(url).put_if_absent("t/a", b"x"))
    assert asyncio.run(open_store(url).read("t/a")) == b"x"
    assert (tmp_path / "a b" / "t" / "a").read_bytes() == b"x"


def test_memory_url() -> None:
    """Each `memory:` store is separate."""
    assert asyncio.run(open_store("memory:").put_if_absent("t/a", b"x"))
    assert asyncio.run(open_store("memory:").put_if_absent("t/a", b"x"))


@pytest.mark.parametrize(
    "url", ["", "/tmp/x", "file:relative", "file://host/x", "gs://bucket", "file:///x?y", "memory", "file:///a%00b"]
)
def test_other_urls(url: str) -> None:
    """Any other URL is refused with the name of the setting."""
    with pytest.raises(BadSetting, match="KELVIN_STORE="):
        open_store(url)


def test_a_file_where_the_store_should_be_is_refused(tmp_path: Path) -> None:
    """A store path below a file is refused in one line as a bad setting."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadSetting, match=r"KELVIN_STORE=.*a file is in the way"):
        open_store((tmp_path / "file" / "store").as_uri())


def test_a_directory_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory without write permission is a bad setting. A failing disk isn't one: it may recover."""

    def failing(number: int) -> Callable[[Path], None]:
        def mkdir(path: Path) -> None:
            raise OSError(number, os.strerror(number), str(path))

        return mkdir

    url = (tmp_path / "store").as_uri()
    monkeypatch.setattr(Path, "mkdir", failing(errno.EACCES))
    with pytest.raises(BadSetting, match="Permission denied"):
        open_store(url)
    monkeypatch.setattr(Path, "mkdir", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        open_store(url)


@pytest.mark.parametrize("url", ["https://key:sesame@host/bucket", "gs://sesame@bucket", "file:///x?token=sesame"])
def test_no_secret_is_repeated(url: str) -> None:
    """A refusal doesn't repeat a secret that was put into an unsupported URL."""
    with pytest.raises(BadSetting) as bad:
        open_store(url)
    assert "sesame" not in str(bad.value)
