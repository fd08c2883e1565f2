"""The client's part of a push, called on `Pushes` directly. It checks nothing, so that tests can send anything."""

from collections.abc import Mapping
from dataclasses import dataclass

from blake3 import blake3

from kelvin.contracts.artifacts.push_api import Committed, Committing, MissingRequest, Plan, PlanRequest
from kelvin.contracts.wire import encode
from snapshotter.intake.policy.layout import assemble
from snapshotter.push.commits import digest_of_list
from snapshotter.push.pushes import Pushes

TENANT = "acme"


@dataclass(frozen=True)
class Opened:
    """A push whose client knows which chunks are missing."""

    push_id: str
    digests: tuple[str, ...]
    missing: tuple[str, ...]
    chunks: Mapping[str, bytes]  # all of them, by digest


def digests_of(plan: Plan, files: Mapping[str, bytes]) -> tuple[str, ...]:
    """The digest of each planned chunk."""
    return tuple(blake3(assemble(chunk, dict(files))).hexdigest() for chunk in plan.chunks)


async def open_push(pushes: Pushes, files: Mapping[str, bytes], request: PlanRequest) -> Opened:
    """Make a plan, and ask which of its chunks are missing."""
    return await ask_missing(pushes, await pushes.plan(TENANT, encode(request)), files)


async def ask_missing(pushes: Pushes, plan: Plan, files: Mapping[str, bytes]) -> Opened:
    """Ask which chunks of a plan are missing."""
    data = [assemble(chunk, dict(files)) for chunk in plan.chunks]
    digests = tuple(blake3(chunk).hexdigest() for chunk in data)
    missing = await pushes.find_missing(TENANT, plan.plan_id, MissingRequest(digests=digests))
    return Opened(missing.plan_id, digests, missing.digests, dict(zip(digests, data, strict=True)))


async def send(pushes: Pushes, push: Opened) -> None:
    """Send each missing chunk once."""
    for digest in push.missing:
        data = push.chunks[digest]
        assert await pushes.chunk_bytes(TENANT, push.push_id, digest) == len(data)
        await pushes.put_chunk(TENANT, push.push_id, digest, data)


async def commit(pushes: Pushes, push: Opened) -> Committed:
    """Commit the push. Repeat the call until the version is made."""
    while True:
        answer = await pushes.commit(TENANT, push.push_id, digest_of_list(push.digests))
        if not isinstance(answer, Committing):
            return answer
