"""A head in HTTP/2, read as HTTP/1.1 would have told it."""

import pytest

from activator.policy.h2_head import Head, read_head

GET = [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"a.b"), (b":path", b"/v1?x=1")]
HOST = (b"host", b"a.b")


def _with(name: bytes, value: bytes) -> list[tuple[bytes, bytes]]:
    return [(key, value if key == name else old) for key, old in GET]


@pytest.mark.parametrize(("fields", "want"), [
    pytest.param(GET, Head(b"GET", b"/v1?x=1", [HOST]), id="the authority is the host"),
    pytest.param([*GET, (b"x", b"1"), HOST], Head(b"GET", b"/v1?x=1", [HOST, (b"x", b"1")]), id="which is told once"),
    pytest.param([*GET[:2], GET[3], HOST], Head(b"GET", b"/v1?x=1", [HOST]), id="a host alone"),
    pytest.param([*GET, (b"x", b"a\tb"), (b"x", b"")], Head(b"GET", b"/v1?x=1", [HOST, (b"x", b"a\tb"), (b"x", b"")]),
                 id="the same header twice"),
    pytest.param([*GET, (b"host", b"c")], "host and :authority differ", id="two hosts"),
    pytest.param([*GET, HOST, HOST], "there are two hosts", id="the same host twice"),
    pytest.param([*GET, (b"content-length", b"1"), (b"content-length", b"1")], "there are two lengths", id="lengths"),
    pytest.param([*GET, (b"x y", b"1")], "a header's name is no token", id="a blank in a name"),
    pytest.param([*GET, (b"", b"1")], "a header's name is no token", id="no name"),
    pytest.param([*GET, (b"x", b"a\x00")], "a header holds a control character", id="a NUL"),
    pytest.param([*GET, (b"x", b"a\x7f")], "a header holds a control character", id="a DEL"),
    pytest.param(_with(b":method", b"CONNECT"), "the method is none that is served", id="CONNECT"),
    pytest.param(_with(b":method", b""), "the method is none that is served", id="no method"),
    pytest.param(_with(b":method", b"GET /"), "the method is none that is served", id="a method of two words"),
    *[pytest.param(_with(b":path", path), "the path has to begin with a slash, in ASCII without blanks", id=repr(path))
      for path in (b"", b"*", b"x", b"https://a.b/", b"/a b", b"/\xc3\xa4", b"/\x7f", b"/a\n")],
])  # fmt: skip
def test_read_head(fields: list[tuple[bytes, bytes]], want: Head | str) -> None:
    """Or what is wrong with it."""
    assert read_head(fields) == want
