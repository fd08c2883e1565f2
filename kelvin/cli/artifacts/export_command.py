"""`kelvin export M@VERSION DIR`: write a version as files that other programs read, verifying every byte.

A `.tensors` export returns the pushed tensorizer file if the store kept it, and verifies its digest. Otherwise the
tensorizer library converts a safetensors file in a separate process, and our own reader compares the result.
"""

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import httpx
import msgspec
from blake3 import blake3

from kelvin.cli.artifacts.export_layout_policy import (
    TENSORS_FILE,
    ExportLayout,
    chunk_slices,
    find_bundle,
    plan_layout,
    plan_original_layout,
)
from kelvin.cli.artifacts.progress import Progress, open_progress
from kelvin.cli.artifacts.push_client import PushClient, RetryPolicy, decode_response, open_client, raise_for_failure
from kelvin.cli.artifacts.push_signing import SIGNATURE_FILE
from kelvin.contracts.artifact_errors import ChunkCorrupt, ChunkMissing
from kelvin.contracts.artifacts.manifest import Chunk, Manifest, decode_manifest
from kelvin.contracts.artifacts.push_api import AttestationEntry, AttestationList, Original
from kelvin.contracts.errors import CapacityExceeded, InvalidRequest, ModelNotFound, NotFound, Refused
from kelvin.contracts.names import is_digest, parse_reference
from kelvin.process.atomic_file import sync
from kelvin.process.python_command import python_command
from snapshotter.intake.policy.file_roles import SINGLE_FILE
from snapshotter.intake.policy.safetensors_header import PREFIX_BYTES as SAFETENSORS_PREFIX
from snapshotter.intake.policy.safetensors_header import SourceTensor, header_bytes, parse_header
from snapshotter.intake.policy.tensors_index import (
    INDEX_BYTES,
    PREFIX_BYTES,
    ContentCheck,
    IndexEntry,
    index_end,
    max_index_bytes,
    parse_index,
)

CONVERSION_TIMEOUT_S: Final = 4 * 3600.0
WRITER: Final = tuple(python_command("snapshotter.intake.tensorizer_writer"))
_NOT_INSTALLED: Final = 3
_BLOCK: Final = 8 << 20
RECEIVERS: Final = 4
RESOLVE_TIMEOUT_S: Final = 60.0
FORMATS: Final = ("safetensors", "tensors")


def check_fits(manifest: Manifest) -> None:
    """Check that the version can be a .tensors file: its index has a fixed size, and it holds only tensors. Call it
    before chunks are fetched. Raises `Refused` with CapacityExceeded or InvalidRequest.
    """
    if manifest.signature is not None:
        raise Refused(InvalidRequest("format", "tensors", "this version is a graph: export it as it was pushed"))
    need = sum(max_index_bytes(tensor.name, tensor.dtype, tensor.shape) for tensor in manifest.tensors)
    if need > INDEX_BYTES:
        raise Refused(CapacityExceeded("bytes of a .tensors file's index", need, INDEX_BYTES))


def check_original(path: Path, original: Original, manifest: Manifest) -> None:
    """Check that the file has the digest of its push and holds the version's tensors. Raises `Refused`."""
    whole = blake3(max_threads=1)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            whole.update(block)
        if whole.hexdigest() != original.digest:
            raise Refused(ChunkCorrupt(original.digest, "transit"))
        entries = read_index(file.fileno(), path.name)
    if not _names_tensors_of(entries, manifest):
        raise Refused(InvalidRequest("format", "tensors", "the file that was pushed holds other tensors"))


def _names_tensors_of(entries: Sequence[IndexEntry], manifest: Manifest) -> bool:
    facts = {each.tensor.name: (each.tensor.dtype, each.tensor.shape) for each in entries}
    return facts == {each.name: (each.dtype, each.shape) for each in manifest.tensors}


def convert(source: Path, target: Path, manifest: Manifest) -> None:
    """Write `target`, compare each tensor with `source` and with the manifest, remove `source`. Raises `Refused`."""
    command = [*WRITER, str(source), str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CONVERSION_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _conversion_failure(f"took longer than {CONVERSION_TIMEOUT_S:g} s") from None
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    if done.returncode == _NOT_INSTALLED:
        raise _conversion_failure(f"{last}: `pip install 'kelvin-serving[tensorizer]'`")
    if done.returncode:
        raise _conversion_failure(last[:200])
    _compare(source, target, manifest)
    source.unlink()


def _compare(source: Path, target: Path, manifest: Manifest) -> None:
    with ExitStack() as stack:
        ours, theirs = (_open_tensors(stack, path) for path in (source, target))
        size = os.fstat(ours).st_size
        head = os.pread(ours, header_bytes(os.pread(ours, SAFETENSORS_PREFIX, 0), size, source.name), 0)
        wanted = {tensor.name: tensor for tensor in parse_header(source.name, head, size)}
        entries = read_index(theirs, target.name)
        if not _names_tensors_of(entries, manifest):
            raise _conversion_failure("wrote other tensors than it was given")
        for entry in entries:
            if not _is_same(ours, wanted[entry.tensor.name], theirs, entry):
                raise _conversion_failure(f"wrote other bytes of tensor {entry.tensor.name[:80]!r} than it was given")


def read_index(fd: int, path: str) -> tuple[IndexEntry, ...]:
    """Return the index of an open tensorizer file. Raises `Refused(ArtifactRejected)`."""
    size = os.fstat(fd).st_size
    return parse_index(path, os.pread(fd, index_end(os.pread(fd, PREFIX_BYTES, 0), size, path), 0), size)


def _is_same(ours: int, tensor: SourceTensor, theirs: int, entry: IndexEntry) -> bool:
    """Return whether both files hold the same bytes of the tensor. Also check the tensorizer header against them."""
    header = os.pread(theirs, entry.tensor.offset - entry.header_offset, entry.header_offset)
    check = ContentCheck(entry.tensor.path, entry, header)
    for at in range(0, tensor.nbytes, _BLOCK):
        length = min(_BLOCK, tensor.nbytes - at)
        data = os.pread(theirs, length, entry.tensor.offset + at)
        if len(data) != length or data != os.pread(ours, length, tensor.offset + at):
            return False
        check.update(data)
    check.finish()
    return True


def _open_tensors(stack: ExitStack, path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _conversion_failure(why: str) -> Refused:
    return Refused(InvalidRequest("format", "tensors", f"tensorizer {why}"))


class ExportClient(PushClient):
    """API calls of an export. Like the calls of a push, they are retried while a retry may help."""

    def manifest(self, version: str) -> Manifest:
        """Return the manifest, checked against the version's digest. Raises `Refused`."""
        return decode_manifest(self._call("GET", f"/push/v1/manifests/{version}", b"").content, version)

    def find_original(self, version: str) -> Original | None:
        """Return digest, size and layout of the pushed tensorizer file, or None. Not verified. Raises `Refused`."""
        try:
            return decode_response(self._call("GET", f"/push/v1/originals/{version}", b""), Original)
        except Refused as refused:
            if refused.failure.code == NotFound.code:
                return None
            raise

    def attestations(self, version: str) -> tuple[AttestationEntry, ...]:
        """Return the signed statements about the version, and whether the installation trusts them."""
        answer = self._call("GET", f"/push/v1/versions/{version}/attestations", b"")
        return decode_response(answer, AttestationList).attestations

    def chunk(self, digest: str, length: int) -> bytes:
        """Return a chunk, verified against its digest. Raises `Refused`."""
        try:
            data = self._call("GET", f"/push/v1/chunks/{digest}", b"").content
        except Refused as refused:
            if refused.failure.code == NotFound.code:  # the manifest names a chunk that the store lacks
                raise Refused(ChunkMissing(digest)) from refused
            raise
        if len(data) != length or blake3(data, max_threads=1).hexdigest() != digest:
            raise Refused(ChunkCorrupt(digest, "transit"))
        return data


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The files that an export wrote."""

    version: str
    files: tuple[str, ...]
    total_bytes: int
    as_pushed: bool  # the weights are the same file that was pushed


def export_version(
    version: str,
    directory: Path,
    form: str,
    client: httpx.Client,
    progress: Progress,
    retry_policy: RetryPolicy | None = None,
) -> ExportResult:
    """Write the version's files to `directory`, which appears whole or not at all. Raises `Refused`."""
    if directory.exists() or directory.is_symlink():
        raise Refused(InvalidRequest("directory", str(directory), "exists already"))
    progress.begin("looking", None)
    calls = ExportClient(client, retry_policy)
    manifest = calls.manifest(version)
    original = calls.find_original(version) if form == "tensors" else None
    if form == "tensors" and original is None:
        check_fits(manifest)
    layout = plan_layout(manifest, version) if original is None else plan_original_layout(manifest, version, original)
    try:
        with _atomic_directory(directory) as scratch:
            _receive_chunks(calls, manifest, layout, scratch, progress)
            _check_files(manifest, scratch)
            if original is not None:
                check_original(scratch / TENSORS_FILE, original, manifest)
            elif form == "tensors":
                progress.begin("converting", None)
                convert(scratch / SINGLE_FILE, scratch / TENSORS_FILE, manifest)
            elif (bundle := find_bundle(version, calls.attestations(version))) is not None:
                (scratch / SIGNATURE_FILE).write_bytes(bundle)
            files = (path for path in scratch.rglob("*") if path.is_file())
            sizes = {str(path.relative_to(scratch)): path.stat().st_size for path in files}
    except OSError as error:
        rule = f"can't be written: {error.strerror or error}"
        raise Refused(InvalidRequest("directory", str(directory), rule)) from error
    return ExportResult(version, tuple(sorted(sizes)), sum(sizes.values()), original is not None)


@contextmanager
def _atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `directory`. On success, sync all of it and rename it."""
    scratch = directory.absolute().with_name(f".{directory.name}.{secrets.token_hex(8)}")
    scratch.mkdir()
    try:
        yield scratch
        for path in (*scratch.rglob("*"), scratch):
            sync(path)
        scratch.rename(directory)
        sync(scratch.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _receive_chunks(
    calls: ExportClient, manifest: Manifest, layout: ExportLayout, scratch: Path, progress: Progress
) -> None:
    """Write all chunks to their places. A chunk that occurs several times is fetched once."""
    wanted: dict[Chunk, list[int]] = {}
    start = 0
    for chunk in manifest.chunks:
        wanted.setdefault(chunk, []).append(start)
        start += chunk.length
    progress.begin("receiving", sum(chunk.length for chunk in wanted))
    with ExitStack() as stack:
        files = {path: _create(stack, scratch / path, size) for path, size in layout.sizes.items()}
        for path, at, data in layout.fixed:
            _write(files[path], data, at)

        def receive(chunk: Chunk) -> None:
            data = memoryview(calls.chunk(chunk.digest, chunk.length))
            for begin in wanted[chunk]:
                for path, offset, part in chunk_slices(layout, begin, chunk.length):
                    _write(files[path], data[part], offset)
            progress.advance(chunk.length)

        pool = ThreadPoolExecutor(RECEIVERS)
        try:
            for _ in pool.map(receive, wanted):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


def _create(stack: ExitStack, path: Path, size: int) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    stack.callback(os.close, fd)
    os.ftruncate(fd, size)
    return fd


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    left = memoryview(data)
    while left:
        count = os.pwrite(fd, left, offset)
        left, offset = left[count:], offset + count


def _check_files(manifest: Manifest, scratch: Path) -> None:
    """Check the digests of pinned files. The chunks were verified; this verifies the manifest's entries about files."""
    for file in manifest.files:
        if (found := blake3((scratch / file.path).read_bytes()).hexdigest()) != file.digest:
            raise Refused(ChunkCorrupt(found, "transit"))


def resolve_version(client: httpx.Client, reference: str) -> str:
    """Return the version of `M`, `M@prod` or `M@HEX`, or the given 64 digits. Raises `Refused`."""
    if is_digest(reference):  # a model's name is never a digest
        return reference
    named = parse_reference(reference)
    answer = raise_for_failure(client.request("GET", f"/admin/v1/models/{named.model}", timeout=RESOLVE_TIMEOUT_S))
    found = decode_response(answer, _Model)
    if named.alias is not None:
        fitting = [found.aliases[named.alias]] if named.alias in found.aliases else []
    else:
        prefix = named.version_prefix or ""
        fitting = [each.version for each in found.versions if each.version.startswith(prefix)]
    if len(fitting) > 1:
        raise Refused(InvalidRequest("version", reference, f"fits {len(fitting)} versions; give more digits"))
    if not fitting:
        raise Refused(ModelNotFound(reference))
    return fitting[0]


class _Version(msgspec.Struct):
    version: str


class _Model(msgspec.Struct):
    """The part of the admin API's response that names versions."""

    aliases: dict[str, str]
    versions: list[_Version]


@click.command("export")
@click.argument("reference", metavar="M@VERSION")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), default="safetensors", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export_command(reference: str, directory: Path, form: str, as_json: bool) -> None:
    """Write a version to a new directory. Pinned files are unchanged, weights are one file.

    \b
    kelvin export tinylm@prod ./tinylm
    """
    with open_client() as client, open_progress(not as_json) as progress:
        exported = export_version(resolve_version(client, reference), directory, form, client, progress)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(exported)))
        return
    origin = ", the weights as they were pushed" if exported.as_pushed else ""
    click.echo(f"{directory}: {len(exported.files)} files, {exported.total_bytes} bytes{origin}")
    click.echo(exported.version)
