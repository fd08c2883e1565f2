"""A URL opens the store that it names, and nothing else."""

import asyncio
from pathlib import Path

import pytest

from blobstore.factory import open_store
from contracts.settings import BadSetting


def test_file_url(tmp_path: Path) -> None:
    """Two openings of one file URL see the same objects, also where the path has characters that URLs escape."""
    url = (tmp_path / "a b").as_uri()
    assert asyncio.run(open_store(url).put_if_absent("t/a", b"x"))
    assert asyncio.run(open_store(url).read("t/a")) == b"x"
    assert (tmp_path / "a b" / "t" / "a").read_bytes() == b"x"


def test_memory_url() -> None:
    """Each opening of `memory:` is a store of its own."""
    assert asyncio.run(open_store("memory:").put_if_absent("t/a", b"x"))
    assert asyncio.run(open_store("memory:").put_if_absent("t/a", b"x"))


@pytest.mark.parametrize(
    "url", ["", "/tmp/x", "file:relative", "file://host/x", "gs://bucket", "file:///x?y", "memory"]
)
def test_other_urls(url: str) -> None:
    """Anything else is refused, with the setting's name and value."""
    with pytest.raises(BadSetting, match="KELVIN_STORE="):
        open_store(url)
