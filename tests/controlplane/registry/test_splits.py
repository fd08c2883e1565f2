"""Traffic splits of a model: valid weights, how long a split lasts, and the feed row."""

from functools import partial
from pathlib import Path

import msgspec
import pytest

from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import VersionKey
from controlplane.registry.policy.version_lifecycle import VersionEvent
from controlplane.registry.registry import Registry
from kelvin.contracts.errors import Conflict, InvalidRequest, ModelNotFound, NotFound
from tests.controlplane.builders import BY, NOW_S, TENANT, digest, key, opened_registry, refusal, registration
from tests.controlplane.control_plane_server import push, running_control_plane

A, B, C = "a" * 12, "b" * 12, "c" * 12


async def _pushed(registry: Registry, *letters: str) -> None:
    for at, letter in enumerate(letters):
        await registry.register(registration(letter=letter), NOW_S + at)


@pytest.mark.usefixtures("backend")
async def test_split_is_published_stored_and_ended(tmp_path: Path) -> None:
    """The split has whole digests in the feed and after a restart. An empty split or a deploy ends it."""
    feed = FeedHub()
    async with opened_registry(tmp_path, feed) as registry:
        await _pushed(registry, "a", "b", "c")
        named: list[VersionKey] = []
        registry.on_alias_moved = named.append
        assert await registry.split(BY, TENANT, "m", {B: 10, A: 90}, NOW_S) == {digest("a"): 90, digest("b"): 10}
        assert sorted(named) == [key(letter="a"), key(letter="b")], "the versions of the split are prefetched"
        assert registry.model(TENANT, "m").named == {digest("a"), digest("b")}
        assert feed.snapshot().models[0].split == {digest("a"): 90, digest("b"): 10}
        before = registry.model(TENANT, "m")
    async with opened_registry(tmp_path, feed) as registry:
        assert registry.model(TENANT, "m") == before
        assert await registry.split(BY, TENANT, "m", {}, NOW_S) == {}
        assert feed.snapshot().models[0].split == {}
        await registry.split(BY, TENANT, "m", {A: 1, C: 1}, NOW_S)
        await registry.deploy(BY, TENANT, "m", A, NOW_S)
        assert feed.snapshot().models[0].split == {}
        assert registry.model(TENANT, "m").aliases == {"prod": digest("a")}
    async with opened_registry(tmp_path) as registry:
        assert registry.model(TENANT, "m").split == {}


@pytest.mark.usefixtures("backend")
async def test_invalid_split_is_refused(tmp_path: Path) -> None:
    """Each refusal names the value, and nothing changes."""
    async with opened_registry(tmp_path) as registry:
        await _pushed(registry, "a", "b", "c")
        embeds = msgspec.structs.replace(registration(letter="e"), kind="embed")
        await registry.register(embeds, NOW_S)
        await registry.record_event(key(letter="c"), VersionEvent.FOUND_BROKEN, "chunk_corrupt")
        split = partial(registry.split, BY)
        assert await refusal(split(TENANT, "nope", {}, NOW_S)) == ModelNotFound("nope")
        assert await refusal(split("other", "m", {A: 1, B: 1}, NOW_S)) == ModelNotFound("m")
        assert await refusal(split(TENANT, "m", {A: 1, "d" * 12: 1}, NOW_S)) == NotFound("version", "m@" + "d" * 12)
        assert isinstance(await refusal(split(TENANT, "m", {A: 1, "b": 1}, NOW_S)), InvalidRequest)
        assert await refusal(split(TENANT, "m", {A: 1, "a" * 13: 1}, NOW_S)) == InvalidRequest(
            "weights", A, "must name each version once"
        )
        assert isinstance(await refusal(split(TENANT, "m", {A: 1}, NOW_S)), InvalidRequest)
        assert isinstance(await refusal(split(TENANT, "m", {A: 1, C: 1}, NOW_S)), Conflict)
        assert await refusal(split(TENANT, "m", {A: 1, "e" * 12: 1}, NOW_S)) == Conflict(
            "the split", "its versions are of several kinds: embed, generate"
        )
        assert registry.model(TENANT, "m").split == {}
        await split(TENANT, "m", {A: 1, B: 1}, NOW_S)
        refused = await refusal(registry.delete(BY, TENANT, "m", B, NOW_S, lambda _: False))
        assert refused == Conflict(f"version {B}", "requests are split to it: `kelvin models split m` ends that")


@pytest.mark.parametrize(
    ("weights", "status"),
    [
        pytest.param({A: 3, B: 1}, 200, id="two versions"),
        pytest.param({}, 200, id="no versions"),
        pytest.param({A: 0, B: 1}, 400, id="a weight of zero"),
        pytest.param({A: 1001, B: 1}, 400, id="a weight that is too large"),
        pytest.param({A: 1.5, B: 1}, 400, id="half a weight"),
        pytest.param({letter * 12: 1 for letter in "0123456789abcdefg"}, 400, id="too many versions"),
        pytest.param({A: 1}, 400, id="a single version"),
        pytest.param({A: 1, C: 1}, 404, id="an unknown version"),
    ],
)
async def test_the_route(tmp_path: Path, weights: dict[str, float], status: int) -> None:
    """An accepted split is returned, and shown in the model."""
    async with running_control_plane(tmp_path) as client:
        for letter in "ab":
            await push(client, letter=letter)
        got, answer = await client.admin("PUT", "/models/m/split", {"weights": weights})
        assert got == status, answer
        want = {each[0] * 64: weight for each, weight in weights.items()} if status == 200 else {}
        if status == 200:
            assert answer == {"weights": want}
        assert (await client.admin("GET", "/models/m"))[1]["split"] == want
