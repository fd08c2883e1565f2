"""Summarize a manifest's long lists: tensors by type, the largest tensor, chunks. Pure."""

from collections import Counter
from math import prod
from typing import Any

from kelvin.contracts.artifacts.manifest import Manifest


def summarize_manifest(manifest: Manifest) -> dict[str, Any]:
    """Return `tensors`, `chunks` and `total_bytes`, as `kelvin show` prints them."""
    by_dtype: Counter[str] = Counter()
    for tensor in manifest.tensors:
        by_dtype[tensor.dtype] += tensor.nbytes
    largest = max(manifest.tensors, key=lambda tensor: tensor.nbytes, default=None)
    shown = None
    if largest is not None:
        shown = {"name": largest.name, "dtype": largest.dtype, "shape": list(largest.shape), "bytes": largest.nbytes}
    return {
        "tensors": {
            "count": len(manifest.tensors),
            "parameters": sum(prod(tensor.shape) for tensor in manifest.tensors),
            "bytes_by_dtype": dict(sorted(by_dtype.items())),
            "largest": shown,
        },
        "chunks": {
            "count": len(manifest.chunks),
            "distinct": len({chunk.digest for chunk in manifest.chunks}),
        },
        "total_bytes": manifest.total_bytes,
    }
