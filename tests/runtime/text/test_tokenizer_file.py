"""The fast reader of tokenizer files gives the library's tokenizer, or leaves the file to the library."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from kelvin.contracts.errors import Refused
from runtime.text import tokenizer_file
from runtime.text.tokenizer import check_fast_reader
from runtime.text.tokenizer_file import LARGE_BYTES, read_tokenizer, reads_same_tokenizer
from tests.runtime.vocabularies import byte_level, metaspace

TEXT = "In the beginning was two words </s> Größe, 中文字符 emoji 😀\n  x = 1"


def changed(change: Callable[[dict[str, Any]], object], raw: bytes = b"") -> bytes:
    """Return the byte-level tokenizer's file after `change`."""
    file = json.loads(raw or byte_level())
    change(file)
    return json.dumps(file).encode()


def spaced(file: dict[str, Any]) -> None:
    """Write merges as older versions do."""
    file["model"]["merges"] = [" ".join(pair) for pair in file["model"]["merges"]]


def sparse(file: dict[str, Any]) -> None:
    """Remove fields that older versions don't have."""
    for name in ("byte_fallback", "ignore_merges", "fuse_unk", "dropout"):
        del file["model"][name]


def options(file: dict[str, Any]) -> None:
    """Set every option of a model."""
    file["model"] |= {"ignore_merges": True, "fuse_unk": True, "unk_token": "<s>", "end_of_word_suffix": "</w>"}


def more(file: dict[str, Any]) -> None:
    """Add special and plain tokens in turns."""
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    first = 1 + max(token["id"] for token in (*file["added_tokens"], {"id": max(file["model"]["vocab"].values())}))
    for number, special in enumerate((True, False, True)):
        token = usual | {"id": first + number, "content": f"<|{number}|>", "special": special, "lstrip": special}
        file["added_tokens"].append(token | {"normalized": not special})


QUICK = [
    pytest.param(byte_level(), id="byte-level"),
    pytest.param(metaspace(), id="with bytes for unknown characters"),
    pytest.param(changed(spaced), id="merges as texts"),
    pytest.param(changed(sparse), id="without what is newer"),
    pytest.param(changed(options), id="every option"),
    pytest.param(changed(lambda file: file["model"].pop("type")), id="a model that does not say its kind"),
    pytest.param(changed(more), id="special and plain tokens in turns"),
]


@pytest.mark.parametrize("raw", QUICK)
def test_fast_reader_gives_the_librarys_tokenizer(raw: bytes) -> None:
    """Both have the same content and encode a text equally."""
    quick, librarys = tokenizer_file._try_fast(raw), Tokenizer.from_buffer(raw)
    assert quick is not None
    assert quick.to_str() == librarys.to_str()
    assert quick.encode(TEXT).ids == librarys.encode(TEXT).ids
    assert reads_same_tokenizer(raw, large_bytes=0)


def gap(file: dict[str, Any]) -> None:
    """Give an added token an id that is not the next one."""
    file["added_tokens"][-1]["id"] += 7


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(changed(gap), id="ids with a gap"),
        pytest.param(changed(lambda file: file["model"].update(dropout=0.1)), id="dropout"),
        pytest.param(changed(lambda file: file["added_tokens"][0].update(new=1)), id="a field that is not known"),
        pytest.param(
            changed(lambda file: file.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"})),
            id="another kind",
        ),
    ],
)
def test_unknown_tokenizer_fields_use_the_library(raw: bytes) -> None:
    """An unknown field or kind is left to the library."""
    assert tokenizer_file._try_fast(raw) is None
    assert read_tokenizer(raw, large_bytes=0).to_str() == Tokenizer.from_buffer(raw).to_str()


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"{", id="no JSON"),
        pytest.param(changed(lambda file: file["model"]["merges"].append(["never", "seen"])), id="a merge of nothing"),
        pytest.param(changed(lambda file: file["model"]["merges"].append("a b c")), id="a merge of three"),
        pytest.param(changed(lambda file: file["model"]["vocab"].update(x=-1)), id="an id below zero"),
    ],
)
def test_faulty_tokenizer_gets_the_librarys_error(raw: bytes) -> None:
    """The error is the library's, whichever reader was tried first."""
    with pytest.raises(Exception, match=r".") as librarys:
        Tokenizer.from_buffer(raw)
    with pytest.raises(Exception, match=r".") as ours:
        read_tokenizer(raw, large_bytes=0)
    assert str(ours.value) == str(librarys.value)


def test_sealing_compares_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealing refuses a file that both readers read differently (control: a reader that drops an attribute)."""
    assert reads_same_tokenizer(changed(more), large_bytes=0)
    monkeypatch.setattr(tokenizer_file, "_added", lambda token: AddedToken(token.content, special=token.special))
    assert not reads_same_tokenizer(changed(more), large_bytes=0)
    with pytest.raises(Refused, match="read differently"):
        check_fast_reader(changed(more) + b" " * LARGE_BYTES)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AA=="}}, id="it panics"),
        pytest.param({"normalizer": {"type": "Unheard"}}, id="it raises"),
    ],
)
def test_large_file_that_does_not_load_is_named(part: dict[str, Any]) -> None:
    """Sealing reads a large file with both readers first."""
    with pytest.raises(Refused, match=r"tokenizer\.json: does not load"):
        check_fast_reader(changed(lambda file: file.update(part)) + b" " * LARGE_BYTES)
