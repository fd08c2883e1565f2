"""A lease's tensors, without a copy: views of the read-only mapping. Writing to one is a SIGSEGV, by design."""

import ctypes
from collections.abc import Mapping
from typing import Final

import torch

from contracts.manifest import Tensor
from weightcache.client import Lease

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def tensors(lease: Lease) -> dict[str, torch.Tensor]:
    """By name, in the manifest's order. They keep the lease object alive, but not its mapping past `close`."""
    if not lease.total_bytes:
        return {tensor.name: _empty(tensor) for tensor in lease.manifest.tensors}
    # A ctypes buffer claims to be writable: a read-only one would make torch warn for each tensor.
    buffer = (ctypes.c_ubyte * lease.total_bytes).from_address(lease.address)
    buffer._lease = lease  # type: ignore[attr-defined]
    lease.lend(buffer)
    return {tensor.name: _viewed(buffer, tensor) for tensor in lease.manifest.tensors}


def _viewed(buffer: object, tensor: Tensor) -> torch.Tensor:
    dtype = DTYPES[tensor.dtype]
    count = tensor.nbytes // dtype.itemsize
    if not count:
        return _empty(tensor)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=tensor.offset)
    return flat.view(tensor.shape)


def _empty(tensor: Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
