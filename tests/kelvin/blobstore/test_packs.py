"""The footer of a pack round-trips, and a damaged footer is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.blobstore.packs import (
    MAGIC,
    TRAILER_BYTES,
    PackEntry,
    assign_offsets,
    decode_footer,
    decode_table,
    encode_footer,
    encode_table,
    footer_bytes,
)
from kelvin.contracts.artifact_errors import PackCorrupt
from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import Failure, Refused


def digest(n: int) -> str:
    return f"{n:064x}"


def outcome(tail: bytes, size: int) -> tuple[PackEntry, ...] | Failure:
    try:
        return decode_footer(tail, size, "p")
    except Refused as refused:
        return refused.failure


CHUNKS = [(digest(1), 2 * PAGE_BYTES), (digest(2), PAGE_BYTES), (digest(3), 5 * PAGE_BYTES)]
BODY_BYTES = 8 * PAGE_BYTES


@given(st.lists(st.integers(1, 2048), max_size=40))
def test_round_trip(pages: list[int]) -> None:
    """A placed sequence of chunks round-trips through the footer and through the index object."""
    entries = assign_offsets((digest(n), count * PAGE_BYTES) for n, count in enumerate(pages))
    footer = encode_footer(entries)
    size = sum(pages) * PAGE_BYTES + len(footer)
    assert footer_bytes(footer[-TRAILER_BYTES:], size, "p") == len(footer)
    assert decode_footer(footer, size, "p") == entries
    assert decode_footer(b"chunk bytes" + footer, size, "p") == entries
    assert decode_table(encode_table(entries), "p") == entries
    assert encode_table(entries) == footer[:-TRAILER_BYTES]


@given(st.data())
def test_any_flipped_bit(data: st.DataObject) -> None:
    """A flipped bit in the footer is refused or gives different entries. It never crashes."""
    footer = bytearray(encode_footer(assign_offsets(CHUNKS)))
    at = data.draw(st.integers(0, len(footer) * 8 - 1))
    footer[at // 8] ^= 1 << at % 8
    assert outcome(bytes(footer), BODY_BYTES + len(footer)) != assign_offsets(CHUNKS)


@given(st.binary(max_size=400))
def test_any_bytes(tail: bytes) -> None:
    """Arbitrary bytes decode or raise `PackCorrupt`, and nothing else."""
    for raw in (tail, tail + MAGIC, tail + len(tail).to_bytes(8, "little") + MAGIC):
        assert isinstance(outcome(raw, len(raw)), PackCorrupt | tuple)


FOOTER = encode_footer(assign_offsets(CHUNKS))


@pytest.mark.parametrize(
    ("tail", "size", "reason"),
    [
        pytest.param(FOOTER[1:], BODY_BYTES + len(FOOTER), "was cut", id="the footer is cut"),
        pytest.param(FOOTER, BODY_BYTES + len(FOOTER) - 1, "after its footer begins", id="the pack is cut"),
        pytest.param(FOOTER[:-1], BODY_BYTES + len(FOOTER), "magic", id="the magic is cut"),
        pytest.param(b"", 0, "magic", id="an empty pack"),
        pytest.param(FOOTER[-TRAILER_BYTES:], TRAILER_BYTES, "claims", id="a table longer than the pack"),
    ],
)
def test_truncated_pack_is_refused(tail: bytes, size: int, reason: str) -> None:
    """The refusal of a truncated pack says what was cut."""
    with pytest.raises(Refused, match=reason):
        decode_footer(tail, size, "p")


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([PackEntry(digest(1), 1, PAGE_BYTES)], id="an offset off the page"),
        pytest.param([PackEntry(digest(1), 0, 100)], id="a length off the page"),
        pytest.param([PackEntry(digest(1), 0, 0)], id="an empty chunk"),
        pytest.param(
            [PackEntry(digest(1), 0, 2 * PAGE_BYTES), PackEntry(digest(2), PAGE_BYTES, PAGE_BYTES)], id="an overlap"
        ),
        pytest.param(
            [PackEntry(digest(1), PAGE_BYTES, PAGE_BYTES), PackEntry(digest(2), 0, PAGE_BYTES)], id="out of order"
        ),
        pytest.param(
            [PackEntry(digest(1), 0, PAGE_BYTES), PackEntry(digest(1), PAGE_BYTES, PAGE_BYTES)], id="a chunk twice"
        ),
    ],
)
def test_bad_entries(entries: list[PackEntry]) -> None:
    """Entries that break a rule are refused by the encoder and by the decoder."""
    with pytest.raises(ValueError, match="chunk"):
        encode_table(entries)
    table = str([[entry.digest, entry.offset, entry.length] for entry in entries]).replace("'", '"').replace(" ", "")
    with pytest.raises(Refused, match="pack p: chunk"):
        decode_table(table.encode(), "p")


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(b"[]x", id="bytes after the table"),
        pytest.param(b"[ ]", id="a space"),
        pytest.param(b'[["' + b"0" * 64 + b'",0,4096,1]]', id="a fourth field"),
        pytest.param(b'[["' + b"0" * 63 + b'",0,4096]]', id="a short digest"),
        pytest.param(b'[["' + b"A" * 64 + b'",0,4096]]', id="upper case"),
        pytest.param(b'[["' + b"0" * 64 + b'",-4096,4096]]', id="a negative offset"),
        pytest.param(b"\xff", id="not UTF-8"),
    ],
)
def test_not_canonical(table: bytes) -> None:
    """Only the canonical encoding is accepted, so each set of entries has exactly one."""
    with pytest.raises(Refused):
        decode_table(table, "p")
