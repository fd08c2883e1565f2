"""Check that a version is made of the local files and of nothing else. This must hold before it is signed. Pure."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from blake3 import blake3

from kelvin.contracts.artifacts.manifest import Manifest
from kelvin.contracts.artifacts.push_api import Plan
from snapshotter.intake.policy.safetensors_header import SourceTensor


class LinearSpace:
    """Maps bytes of a plan's linear space to source files."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._starts = [0, *accumulate(chunk.length for chunk in plan.chunks)]

    def chunk_at(self, offset: int) -> int:
        """Return the index of the chunk that holds this byte."""
        return bisect_right(self._starts, offset) - 1

    def start_of(self, number: int) -> int:
        """Return the offset of that chunk's first byte."""
        return self._starts[number]

    def source_of(self, offset: int, nbytes: int) -> tuple[str, int] | None:
        """Return (file, offset) of a range that is contiguous in one file, else None."""
        found: tuple[str, int] | None = None
        done = 0
        while done < nbytes:
            piece = self._piece_at(offset + done)
            if piece is None or (found is not None and piece[:2] != (found[0], found[1] + done)):
                return None
            found = found or piece[:2]
            done += piece[2]
        return found

    def _piece_at(self, offset: int) -> tuple[str, int, int] | None:
        """Return (file, offset, bytes that follow) of one byte. None for padding and past the end."""
        number = self.chunk_at(offset)
        if number >= len(self.plan.chunks):
            return None
        at = self._starts[number]
        for piece in self.plan.chunks[number].pieces:
            if at <= offset < at + piece.length:
                return piece.path, piece.offset + offset - at, piece.length - (offset - at)
            at += piece.length + piece.pad
        return None


def find_mismatch(
    manifest: Manifest,
    space: LinearSpace,
    digests: Sequence[str],
    pinned: Mapping[str, bytes],
    tensors: Sequence[SourceTensor],
) -> str | None:
    """Return the first part of the manifest that does not match the local files, as text. None if all match. `digests`
    are of the plan's chunks as read locally; `tensors` come from the local headers.
    """
    chunk_sizes = [(digest, chunk.length) for digest, chunk in zip(digests, space.plan.chunks, strict=True)]
    if [(chunk.digest, chunk.length) for chunk in manifest.chunks] != chunk_sizes:
        return "its chunks are not those of this push"
    if pinned.keys() != {file.path for file in manifest.files}:
        return "its files are not those here"
    for file in manifest.files:
        content = pinned[file.path]
        if file.size != len(content) or file.digest != blake3(content).hexdigest():
            return f"its file '{file.path[:80]}' is not the one here"
        if file.size and space.source_of(file.offset, file.size) != (file.path, 0):
            return f"its file '{file.path[:80]}' lies elsewhere"
    here = {tensor.name: tensor for tensor in tensors}
    if here.keys() != {tensor.name for tensor in manifest.tensors}:
        return "its tensors are not those of the files here"
    for tensor in manifest.tensors:
        local_tensor = here[tensor.name]
        if (tensor.dtype, tensor.shape) != (local_tensor.dtype, local_tensor.shape):
            return f"its tensor '{tensor.name[:80]}' has another type or shape"
        if tensor.nbytes and space.source_of(tensor.offset, tensor.nbytes) != (local_tensor.path, local_tensor.offset):
            return f"its tensor '{tensor.name[:80]}' has other bytes"
    return None
