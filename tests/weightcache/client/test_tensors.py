"""Tensors are read-only views of the mapping, equal to the published ones, without a copy."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kelvin.contracts.artifacts.manifest import PAGE_BYTES, Tensor
from tests.weightcache.kit import Version, make_version, make_version_of, pad, run_agent, settings_of
from weightcache.client.device_copy import DTYPES, view_tensors

VALUES: dict[str, torch.Tensor] = {
    "F64": torch.tensor([[1.5, -2.0], [0.0, 1e300]], dtype=torch.float64),
    "F32": torch.tensor([1.5, float("inf"), -0.0]),
    "F16": torch.tensor([[1.5], [65504.0]], dtype=torch.float16),
    "BF16": torch.tensor([1.0, -3.0, 2.0**100], dtype=torch.bfloat16),
    "I64": torch.tensor([-(2**62), 7]),
    "I32": torch.tensor([[[-5, 6]]], dtype=torch.int32),
    "I16": torch.tensor([-300, 300], dtype=torch.int16),
    "I8": torch.tensor([-128, 127], dtype=torch.int8),
    "U8": torch.tensor([0, 255], dtype=torch.uint8),
    "BOOL": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty((0, 4)),
}


def version_of(values: dict[str, torch.Tensor]) -> Version:
    names = {dtype: name for name, dtype in DTYPES.items()}
    described: list[Tensor] = []
    sections: list[bytes] = []
    for name, value in values.items():
        offset = sum(len(section) for section in sections)
        described.append(Tensor(name, names[value.dtype], tuple(value.shape), offset))  # type: ignore[arg-type]
        raw = bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist()) if value.numel() else b""
        sections.append(pad(raw))
    return make_version_of([section for section in sections if section], PAGE_BYTES, (), described)


def test_every_dtype(tmp_path: Path) -> None:
    """Every dtype and shape is restored, scalars and empty tensors included."""
    version = version_of(VALUES)
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(version)
        with agent.acquire(version) as lease:
            found = view_tensors(lease)
            assert list(found) == list(VALUES)
            for name, value in VALUES.items():
                assert found[name].dtype is value.dtype
                assert torch.equal(found[name], value), name
                assert found[name].shape == value.shape
                assert found[name].is_contiguous()


def test_no_copy(tmp_path: Path) -> None:
    """A tensor's storage is the mapping itself, at a page boundary."""
    version = make_version(seed=1, pages=(600, 3), chunk_pages=64)
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(version)
        with agent.acquire(version) as lease:
            found = view_tensors(lease)
            for tensor in version.manifest.tensors:
                assert found[tensor.name].data_ptr() == lease.address + tensor.offset
                assert found[tensor.name].data_ptr() % PAGE_BYTES == 0
            raw = found["tensor0"].view(torch.uint8).flatten()
            first = version.manifest.tensors[0]
            assert bytes(raw[:PAGE_BYTES].tolist()) == version.linear[first.offset : first.offset + PAGE_BYTES]


def test_version_without_bytes(tmp_path: Path) -> None:
    """A version of only empty tensors has nothing to map."""
    version = version_of({"empty": VALUES["empty"]})
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(version)
        with agent.acquire(version) as lease:
            assert view_tensors(lease)["empty"].shape == (0, 4)


WRITER = """
import sys
from pathlib import Path
import torch
from kelvin.ipc.socket_directory import SocketDirectory
from weightcache.client.lease import acquire
from weightcache.client.device_copy import view_tensors

lease = acquire(SocketDirectory(Path(sys.argv[1])), "acme", sys.argv[2], 30.0)
tensor = view_tensors(lease)["tensor0"]
print(bool(tensor.view(torch.uint8).any()), flush=True)
if sys.argv[3] == "copy":
    tensor = tensor.clone()
tensor.zero_()
print("written", flush=True)
"""


@pytest.mark.parametrize(
    ("target", "code", "output"),
    [
        pytest.param("tensor", -signal.SIGSEGV, "True\n", id="a write in place is a SIGSEGV"),
        pytest.param("copy", 0, "True\nwritten\n", id="control: a copy may be written"),
    ],
)
def test_writing_to_a_tensor_is_fatal(tmp_path: Path, target: str, code: int, output: str) -> None:
    """A write to a tensor dies of SIGSEGV, because the mapping is read-only. A copy can be written."""
    version = make_version(seed=1)
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(version)
        command = [sys.executable, "-c", WRITER, str(agent.settings.run), version.id, target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stdout) == (code, output)
