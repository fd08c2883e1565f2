"""The client's part of a push, in memory and without judgement: what the tests send when `kelvin push` is not meant."""

from collections.abc import Awaitable, Callable, Iterable, Mapping

from blake3 import blake3

from contracts.push import Plan
from snapshotter.policy.layout import assemble


def digests_of(plan: Plan, files: Mapping[str, bytes]) -> tuple[str, ...]:
    """The digest of each planned chunk."""
    return tuple(blake3(assemble(chunk, dict(files))).hexdigest() for chunk in plan.chunks)


async def send_missing(
    plan: Plan,
    digests: tuple[str, ...],
    missing: Iterable[str],
    files: Mapping[str, bytes],
    put: Callable[[str, bytes], Awaitable[None]],
) -> None:
    """Send each missing chunk once."""
    chunks = dict(zip(digests, plan.chunks, strict=True))
    for digest in missing:
        await put(digest, assemble(chunks[digest], dict(files)))
