"""Where the bytes of a version belong in the file that was pushed."""

import msgspec
import pytest

from kelvin.cli.artifacts.export_layout_policy import TENSORS_FILE, LayoutSpan, chunk_slices, plan_original_layout
from kelvin.contracts.artifact_errors import ManifestCorrupt
from kelvin.contracts.artifacts.manifest import Chunk, Engine, Limits, Manifest, PinnedFile, Tensor
from kelvin.contracts.artifacts.push_api import Original
from kelvin.contracts.errors import Refused

ENGINE, LIMITS = Engine(1, "Toy", "float32"), Limits(1, 1)
# A page for the config, then two tensors: one of a page and a half, one of half a page.
CHUNKS = tuple(Chunk(digest * 64, length) for digest, length in (("a", 4096), ("b", 8192), ("c", 4096)))
CONFIG = PinnedFile("config.json", 0, 10, "d" * 64)
TENSORS = (Tensor("one", "U8", (6144,), 4096), Tensor("two", "U8", (2048,), 12288))
MANIFEST = Manifest(1, ENGINE, LIMITS, 8192, (CONFIG,), TENSORS, CHUNKS)
# The pushed file: 100 other bytes, tensor two, 50 other bytes, tensor one.
REST = b"h" * 100 + b"m" * 50
FILE = Original("e" * 64, 8342, (((2198, 6144),), ((100, 2048),)), REST)


def test_bytes_of_the_original_lie_where_they_were() -> None:
    """The bytes of a tensor go to their offset in the file. The config is a file of its own."""
    layout = plan_original_layout(MANIFEST, "v", FILE)
    assert layout.sizes == {"config.json": 10, TENSORS_FILE: 8342}
    assert layout.fixed == ((TENSORS_FILE, 0, b"h" * 100), (TENSORS_FILE, 2148, b"m" * 50))
    assert layout.spans == (
        LayoutSpan(0, 10, "config.json", 0),
        LayoutSpan(4096, 6144, TENSORS_FILE, 2198),
        LayoutSpan(12288, 2048, TENSORS_FILE, 100),
    )


def test_bytes_at_the_end_of_the_original() -> None:
    """Bytes that belong to no chunk may come last."""
    layout = plan_original_layout(MANIFEST, "v", msgspec.structs.replace(FILE, size=8345, rest=REST + b"end"))
    assert layout.fixed[-1] == (TENSORS_FILE, 8342, b"end")


def test_several_parts_of_a_chunk() -> None:
    """A chunk may be several spans of the file. Each begins on a page of the linear space."""
    parts = (((0, 4000), (4000, 100)), ((4100, 4096),))
    layout = plan_original_layout(MANIFEST, "v", Original("e" * 64, 8196, parts, b""))
    assert layout.fixed == ()
    assert [(span.start, span.offset) for span in layout.spans[1:]] == [(4096, 0), (8192, 4000), (12288, 4100)]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        pytest.param({"spans": (((0, 1),),) * 4}, "more chunks than it has", id="more chunks than there are"),
        pytest.param(
            {"spans": (((2198, 4096),), ((100, 2048),))}, f"chunk {'b' * 64} does not lie", id="a short chunk"
        ),
        pytest.param(
            {"spans": (((2147, 6144),), ((100, 2048),))}, "bytes at 2147 were said to be two", id="an overlap"
        ),
        pytest.param({"size": 8341}, "bytes at 8341 were said to be two", id="a file that ends before its chunks"),
        pytest.param({"rest": REST + b"x"}, "another size", id="more bytes beside the chunks than there is room"),
    ],
)
def test_original_that_is_not_the_versions_is_refused(changed: dict[str, object], why: str) -> None:
    """The refusal names the contradiction, whatever the index says about the file."""
    with pytest.raises(Refused) as refused:
        plan_original_layout(MANIFEST, "v", msgspec.structs.replace(FILE, **changed))
    assert isinstance(refused.value.failure, ManifestCorrupt)
    assert why in str(refused.value.failure)


def test_pieces_of_a_chunk() -> None:
    """Padding is not written. A range may begin and end within a file."""
    layout = plan_original_layout(MANIFEST, "v", FILE)
    assert [*chunk_slices(layout, 0, 4096)] == [("config.json", 0, slice(0, 10))]
    assert [*chunk_slices(layout, 4096, 8192)] == [(TENSORS_FILE, 2198, slice(0, 6144))]
    assert [*chunk_slices(layout, 8192, 6144)] == [
        (TENSORS_FILE, 6294, slice(0, 2048)),
        (TENSORS_FILE, 100, slice(4096, 6144)),
    ]
    assert [*chunk_slices(layout, 10240, 2048)] == []
