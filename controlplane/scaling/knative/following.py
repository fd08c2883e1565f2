"""Each object of a kind as it is now, one call for each change; None where it is gone."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from controlplane.policy.labels import Place
from controlplane.scaling.knative.cluster import ClusterApi, Json, Ref
from controlplane.scaling.knative.view import Uids
from service.loops import isolated


async def follow(
    api: ClusterApi,
    api_version: str,
    kind: str,
    labels: str,
    take: Callable[[Place, Json | None], None],
    first: asyncio.Event,
) -> None:
    """For ever; `first` is set once all that there is was taken. Whole objects are not kept.

    An object for which `take` raises is skipped and the error recorded: anybody may write such objects, and one of them
    must not hide the others.
    """
    known = Uids()
    async with aclosing(api.watch(api_version, kind, labels=labels)) as changes:
        async for change in changes:
            for ref, obj in known.take(change):
                with isolated(ref):
                    take(place_of(ref), obj)
            first.set()


def place_of(ref: Ref) -> Place:
    """Where it is."""
    return ref.namespace or "", ref.name
