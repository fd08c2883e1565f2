"""Sign what a push makes: a statement of where it comes from, after everything it covers was found to lie here."""

import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from contracts.artifact_errors import ArtifactRejected
from contracts.attestation import ORIGIN, Claims, Origin
from contracts.errors import InvalidRequest, Refused
from contracts.manifest import Manifest, decode_manifest
from contracts.push import AttestRequest, Plan
from contracts.wire import convert
from kelvin.policy.own_bytes import LinearSpace, find_stranger
from kelvin.push_directory import Source
from service.signing import BadKey, Signer, load_signer
from snapshotter.policy.intake import admit

Read = Callable[[int, int], bytes]  # of the version's linear space: offset, length
Bundle = Callable[[Manifest, str, Read], bytes]  # of a manifest, its version and its bytes


@dataclass(frozen=True, slots=True)
class Signing:
    """By whom a push is signed, and what they claim. `bundle` makes an OpenSSF bundle as well."""

    signer: Signer
    claims: Claims
    bundle: Bundle | None = None

    def sign(
        self, raw: bytes, version: str, plan: Plan, digests: tuple[str, ...], source: Source, model: str
    ) -> AttestRequest:
        """The statement about the version whose manifest is `raw`. Raises `Refused` where it is not of this source."""
        manifest = decode_manifest(raw, version)
        space = LinearSpace(plan)
        intake = admit(source.request(model))
        pinned = {file.path: file.content for file in intake.files}
        if (stranger := find_stranger(manifest, space, digests, pinned, intake.tensors)) is not None:
            raise Refused(ArtifactRejected("version", f"nothing was signed: {stranger}"))
        bundle = None if self.bundle is None else self.bundle(manifest, version, _reader(space, source))
        digest = None if bundle is None else blake3(bundle).hexdigest()
        origin = Origin(signed_at_s=int(time.time()), claims=self.claims, bundle=digest)
        return AttestRequest(envelope=self.signer.attest(version, ORIGIN, origin), bundle=bundle)


def read_key(path: Path) -> Signer:
    """Raises `Refused(InvalidRequest)` where the file holds no key that signs."""
    try:
        return load_signer(path)
    except BadKey as bad:
        file, _, rule = str(bad).partition(": ")
        raise Refused(InvalidRequest("sign", file, rule)) from bad


def read_claims(path: Path | None) -> Claims:
    """Of a TOML file. Raises `Refused(InvalidRequest)` naming the rule."""
    if path is None:
        return Claims()
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text())
        return convert(found, Claims)
    except OSError as error:
        raise Refused(InvalidRequest("claims", str(path), error.strerror or "can't be read")) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise Refused(InvalidRequest("claims", str(path), str(error))) from error


def _reader(space: LinearSpace, source: Source) -> Read:
    """Reads chunk by chunk; the last one is kept, as neighbours often share it."""
    kept: list[tuple[int, bytes]] = []

    def chunk(number: int) -> bytes:
        if not kept or kept[0][0] != number:
            kept[:] = [(number, source.read_chunk(space.plan.chunks[number]))]
        return kept[0][1]

    def read(offset: int, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            number = space.chunk_at(offset + len(data))
            within = offset + len(data) - space.start_of(number)
            data += chunk(number)[within : within + nbytes - len(data)]
        return bytes(data)

    return read
