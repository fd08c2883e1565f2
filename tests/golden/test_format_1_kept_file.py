"""Every release opens the golden tensorizer file that was kept as it is, and its index.

`format-1-kept/` was made on 2026-11-21 from the tensors of `format-1/`, in reverse order of their names, so its chunks
are those of that golden version. Never regenerate it.
"""

import json
from pathlib import Path

from blake3 import blake3

from kelvin.blobstore.packs import decode_file_index, encode_file_index
from snapshotter.intake.policy.kept_tensorizer import has_weights_of
from snapshotter.intake.policy.tensors_index import ContentCheck, parse_index
from tests.golden.test_format_1 import TENANT, WEIGHTS, manifest

ROOT = Path(__file__).parent / "format-1-kept" / TENANT
NAME = "194741d893bf206a1d76548f045d664dfa268a21e5adceb3a2f5e99335a38bbe.tensors"
FILE, INDEX = ROOT / "packs" / NAME, ROOT / "index" / NAME
HEAD_BYTES = 73 + 2048


def test_opens_with_nothing_of_ours() -> None:
    """Standard JSON, BLAKE3 and the format's page in docs/ are enough to find the version's chunks in the file."""
    raw = FILE.read_bytes()
    assert blake3(raw).hexdigest() == NAME.removesuffix(".tensors")
    index = json.loads(INDEX.read_bytes())
    assert index["size"] == len(raw)
    found = []
    for digest, spans in index["chunks"]:
        chunk = b"".join(raw[at : at + length] + bytes(-length % 4096) for at, length in spans)
        assert blake3(chunk).hexdigest() == digest
        found.append(digest)
    assert found == [chunk.digest for chunk in manifest().chunks[-len(found) :]]
    assert any(len(spans) > 1 for _, spans in index["chunks"])


def test_todays_code_opens_it() -> None:
    """The index decodes and is canonical, and the file is a tensorizer file with correct hashes."""
    index = decode_file_index(INDEX.read_bytes(), NAME)
    assert encode_file_index(index) == INDEX.read_bytes()
    assert has_weights_of(index, manifest())
    raw = FILE.read_bytes()
    for entry in parse_index(NAME, raw[:HEAD_BYTES], len(raw)):
        check = ContentCheck(NAME, entry, raw[entry.header_offset : entry.tensor.offset])
        data = raw[entry.tensor.offset : entry.tensor.offset + entry.tensor.nbytes]
        check.update(data)
        check.finish()
        assert data == WEIGHTS[entry.tensor.name].data
