"""A tag recognises the bytes that it was taken of, and no others; no other process's tag says anything."""

from hypothesis import given
from hypothesis import strategies as st

from weightcache.verifying import Tags

TAGS = Tags()
NAME, OTHER = "0f" * 32, "f0" * 32


@given(st.binary(min_size=1, max_size=4096), st.data())
def test_only_the_same_bytes_match(data: bytes, draw: st.DataObject) -> None:
    """Any bit, a shorter end, a longer one, and the same bytes under another name are told apart."""
    tag = TAGS.of(memoryview(data), NAME)
    assert len(tag) == 16
    assert TAGS.matches(memoryview(bytes(data)), NAME, tag)
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert not TAGS.matches(memoryview(flipped), NAME, tag)
    assert not TAGS.matches(memoryview(data)[:-1], NAME, tag)
    assert not TAGS.matches(memoryview(data + b"\0"), NAME, tag)
    assert not TAGS.matches(memoryview(data), OTHER, tag)


def test_another_process_has_another_key() -> None:
    """A tag that was written down somewhere would be worth nothing."""
    data = memoryview(b"weights")
    assert not Tags().matches(data, NAME, TAGS.of(data, NAME))
