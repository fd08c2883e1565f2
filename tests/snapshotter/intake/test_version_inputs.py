"""Sealing limits and the inputs digest: equal pushes have equal digests, and every change of a part changes it."""

from collections.abc import Callable

import pytest
from msgspec import structs

from kelvin.contracts.artifacts.manifest import ENGINE_INTERFACE, Limits, PinnedFile, Tensor
from kelvin.contracts.artifacts.runtime_control import GateJob
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.version_inputs import Sealing, choose_limits, choose_sealing, inputs_digest
from tests.snapshotter.control import gate_facts

FACTS = gate_facts(
    GateJob(config_json='{"architectures": ["T"], "vocab_size": 8, "max_position_embeddings": 64}', tensors={})
)
SEALING = choose_sealing(FACTS, "float32", 8192)
FILES = (PinnedFile("config.json", 0, 3, "0" * 64),)
TENSORS = (Tensor("a", "F32", (4,), 4096),)
DIGESTS = ("1" * 64, "2" * 64)


@pytest.mark.parametrize(
    ("positions", "most_input", "most_output"),
    [
        pytest.param(2, 1, 1, id="the smallest model that can answer"),
        pytest.param(2048, 2047, 2047, id="a small model answers with all it has"),
        pytest.param(131072, 131071, 4096, id="a long one is capped"),
    ],
)
def test_limits_leave_a_position_for_the_response(positions: int, most_input: int, most_output: int) -> None:
    """One position is left for the answer."""
    assert choose_limits(positions) == Limits(max_input_tokens=most_input, max_output_tokens=most_output)


def test_embedding_may_use_all_positions() -> None:
    """An embedding model generates nothing, so the input may use all positions. The manifest names its kind."""
    sealing = choose_sealing(structs.replace(FACTS, kind="embed"), "float32", 8192)
    assert sealing.limits == Limits(max_input_tokens=64, max_output_tokens=1)
    assert sealing.engine.kind == "embed"


def test_model_of_one_position_is_refused() -> None:
    """A model of one position has no room for a prompt and an answer."""
    with pytest.raises(Refused, match="1 positions"):
        choose_limits(1)


def test_disagreement_about_the_dtype_is_refused() -> None:
    """If intake and engine read different dtypes from a directory, it is refused."""
    with pytest.raises(Refused, match="reads as float16, but the engine would compute in float32"):
        choose_sealing(FACTS, "float16", 8192)


def test_sealing_names_what_computes() -> None:
    """Interface, architecture and dtype are part of a version."""
    assert (SEALING.engine.interface, SEALING.engine.architecture) == (ENGINE_INTERFACE, "T")


CHANGES: list[tuple[str, Callable[[], str]]] = [
    ("format", lambda: inputs_digest(structs.replace(SEALING, format=2), FILES, TENSORS, DIGESTS)),
    ("chunk size", lambda: inputs_digest(structs.replace(SEALING, chunk_bytes=4096), FILES, TENSORS, DIGESTS)),
    ("interface", lambda: inputs_digest(_engine(interface=2), FILES, TENSORS, DIGESTS)),
    ("dtype", lambda: inputs_digest(_engine(dtype="float16"), FILES, TENSORS, DIGESTS)),
    ("limits", lambda: inputs_digest(structs.replace(SEALING, limits=Limits(1, 1)), FILES, TENSORS, DIGESTS)),
    ("a file", lambda: inputs_digest(SEALING, (structs.replace(FILES[0], digest="3" * 64),), TENSORS, DIGESTS)),
    ("a tensor", lambda: inputs_digest(SEALING, FILES, (structs.replace(TENSORS[0], name="b"),), DIGESTS)),
    ("a chunk", lambda: inputs_digest(SEALING, FILES, TENSORS, (DIGESTS[0], "3" * 64))),
    ("the order of chunks", lambda: inputs_digest(SEALING, FILES, TENSORS, DIGESTS[::-1])),
]


def _engine(**change: object) -> Sealing:
    return structs.replace(SEALING, engine=structs.replace(SEALING.engine, **change))


@pytest.mark.parametrize("digest", [pytest.param(make, id=name) for name, make in CHANGES])
def test_inputs_digest(digest: Callable[[], str]) -> None:
    """Each part of the inputs changes the digest, and equal inputs have equal digests."""
    assert digest() == digest()
    assert digest() != inputs_digest(SEALING, FILES, TENSORS, DIGESTS)
