"""The device's arena equals the lease's bytes. A bad copy is repeated once, and then refused with its chunk."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from kelvin.contracts.artifact_errors import AttestationInvalid, ChunkCorrupt
from kelvin.contracts.artifacts.manifest import PAGE_BYTES, Manifest
from kelvin.contracts.errors import Refused
from tests.weightcache.client.lanes import LANES, Damage, LateLane
from tests.weightcache.kit import attestation_of, make_version, run_agent, settings_of
from weightcache.client import device_copy as device_module
from weightcache.client.device_checksum import BLOCK_BYTES, checksum_of
from weightcache.client.device_copy import Lane, agreed_checksum, copy_to_device, view_tensors
from weightcache.client.lease import Lease
from weightcache.client.spans_policy import Span

VERSION = make_version(seed=1, pages=(700, 7, 90), chunk_pages=64)
RIGHT = checksum_of(memoryview(VERSION.linear))


class Host(Lease):
    """A lease whose memory a test can damage."""

    def __init__(self, manifest: Manifest, memory: ctypes.Array[ctypes.c_char]) -> None:
        self.manifest = manifest
        self.memory = memory
        self.version = VERSION.id
        self.address = ctypes.addressof(memory)
        self.total_bytes = manifest.total_bytes

    def __repr__(self) -> str:
        return f"<Host {self.version[:12]}>"

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.memory).cast("B")[offset : offset + nbytes].toreadonly()

    def ready_parts(self) -> Iterator[Span]:
        yield 0, self.total_bytes


@pytest.fixture
def host() -> Host:
    return Host(VERSION.manifest, ctypes.create_string_buffer(VERSION.linear, len(VERSION.linear)))


def chunk_at(offset: int) -> str:
    begin = 0
    for chunk in VERSION.manifest.chunks:
        begin += chunk.length
        if offset < begin:
            return chunk.digest
    raise AssertionError(offset)


@pytest.mark.parametrize("make", LANES)
@pytest.mark.parametrize("expected", [pytest.param(RIGHT, id="sealed"), pytest.param(None, id="not sealed")])
def test_device_copy_equals_the_mapping(tmp_path: Path, make: Callable[[], Lane], expected: str | None) -> None:
    """Tensors on the device equal those of the mapping, after several rounds of a small ring, and outlive the lease."""
    lane = make()
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        with agent.acquire(VERSION) as lease:
            weights = copy_to_device(lease, lane, expected)
            wanted = {name: tensor.clone() for name, tensor in view_tensors(lease).items()}
    for name, tensor in wanted.items():
        assert weights.tensors[name].device == weights.arena.device
        assert torch.equal(weights.tensors[name].cpu().view(torch.uint8), tensor.view(torch.uint8))
    assert bytes(weights.arena.cpu().numpy()) == VERSION.linear
    assert weights.checksum == RIGHT


def flip(number: int, arrived: torch.Tensor) -> None:
    if number % 4 == 1:
        arrived[4097] ^= 1


def lose_the_end(number: int, arrived: torch.Tensor) -> None:
    if number % 4 == 1:
        arrived[arrived.numel() // 2 :] = 0


def arrive_late(number: int, arrived: torch.Tensor) -> None:
    """Leave the bytes of the first copy, as if the device had been told too early."""
    if number % 4 == 1:
        arrived.copy_(torch.frombuffer(bytearray(VERSION.linear[:BLOCK_BYTES]), dtype=torch.uint8))


def stay_zero(number: int, arrived: torch.Tensor) -> None:
    if number % 4 == 1:
        arrived.zero_()


DAMAGES = [flip, lose_the_end, arrive_late, stay_zero]


def once(damage: Damage) -> Damage:
    """Damage only the first attempt's four copies."""
    return lambda number, arrived: damage(number, arrived) if number < 4 else None


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("expected", [pytest.param(RIGHT, id="sealed"), pytest.param(None, id="not sealed")])
def test_a_bad_copy_is_not_bad_memory(host: Host, damage: Damage, expected: str | None) -> None:
    """A copy that arrives wrong once is repeated, and is right."""
    lane = LateLane(damage=once(damage))
    weights = copy_to_device(host, lane, expected)
    assert bytes(weights.arena.numpy()) == VERSION.linear
    assert lane.arenas == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_copy_that_stays_wrong_is_refused(host: Host, damage: Damage) -> None:
    """A copy that arrives wrong each time is refused with a chunk that is wrong on the device."""
    with pytest.raises(Refused) as refused:
        copy_to_device(host, LateLane(damage=damage), RIGHT)
    failure = refused.value.failure
    assert isinstance(failure, ChunkCorrupt)
    assert failure.tier == "device"
    wrong = {chunk_at(at) for at in range(BLOCK_BYTES - 64 * PAGE_BYTES, 2 * BLOCK_BYTES, PAGE_BYTES)}
    assert failure.chunk in wrong


@pytest.mark.parametrize("damage", DAMAGES)
def test_control_without_sums_serves_damaged_copies(
    host: Host, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: if sums are not compared, the damaged copies are served."""
    monkeypatch.setattr(device_module, "checksum_of_sums", lambda sums, nbytes: RIGHT)
    weights = copy_to_device(host, LateLane(damage=damage), RIGHT)
    assert bytes(weights.arena.numpy()) != VERSION.linear


@pytest.mark.parametrize("expected", [pytest.param(RIGHT, id="sealed"), pytest.param(None, id="not sealed")])
def test_changed_host_memory_is_found(host: Host, expected: str | None) -> None:
    """The seal's checksum finds the change, or without a seal the chunks' digests. The refusal names the chunk."""
    host.memory[3 * BLOCK_BYTES - 5] = bytes([VERSION.linear[3 * BLOCK_BYTES - 5] ^ 4])
    with pytest.raises(Refused) as refused:
        copy_to_device(host, LateLane(), expected)
    assert refused.value.failure == ChunkCorrupt(chunk_at(3 * BLOCK_BYTES - 5), "host")


def test_control_without_hashing_serves_changed_memory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without a seal, and if chunks are not hashed again, the changed bytes are served."""
    host.memory[3 * BLOCK_BYTES - 5] = bytes([VERSION.linear[3 * BLOCK_BYTES - 5] ^ 4])
    monkeypatch.setattr(device_module, "is_digest_of", lambda data, digest: True)
    assert bytes(copy_to_device(host, LateLane(), None).arena.numpy()) != VERSION.linear


def test_wrong_seal_is_refused(host: Host) -> None:
    """If all digests are right but the seal's checksum differs, the seal is refused."""
    with pytest.raises(Refused) as refused:
        copy_to_device(host, LateLane(), "0" * 32)
    assert isinstance(refused.value.failure, AttestationInvalid)


SEAL = attestation_of(VERSION.id)


@pytest.mark.parametrize(
    ("checksums", "want"),
    [
        pytest.param((), None, id="no seal"),
        pytest.param((None,), None, id="a seal of an early store"),
        pytest.param((None, RIGHT, RIGHT), RIGHT, id="seals that have one agree"),
        pytest.param((RIGHT, "0" * 32), None, id="seals contradict each other"),
    ],
)
def test_checksum_in(checksums: tuple[str | None, ...], want: str | None) -> None:
    """The checksum is that of any seal that has one, unless seals contradict each other."""
    assert agreed_checksum([msgspec.structs.replace(SEAL, device_checksum=value) for value in checksums]) == want
