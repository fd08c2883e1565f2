"""The CRD schemas have the settings of the structs, and no others."""

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from kelvin.contracts.patches import patch_of
from tests.manifests.crds import CRDS, PLACES, properties_of, with_settings


@pytest.mark.parametrize(("name", "field", "settings", "patch"), PLACES, ids=[place[0] for place in PLACES])
def test_files_are_up_to_date(name: str, field: str, settings: Any, patch: Any) -> None:
    """Each file equals the output of `python -m tests.manifests.crds`."""
    text = (CRDS / name).read_text()
    assert text == with_settings(text, field, properties_of(settings, patch))


class Things(msgspec.Struct):
    """Settings of each type."""

    count: Annotated[int, Meta(ge=1, le=1 << 40, description="How many.")] | None = None
    wait_s: Annotated[float, Meta(gt=0, le=9, description="How long.")] = 1.0
    name: Annotated[str, Meta(pattern=r"^a$(?!\n)", description="What.")] = "a"
    here: Annotated[int, Meta(ge=0, description="Of one machine.")] = 0


def test_schemas_are_those_of_kubernetes() -> None:
    """Names, units and bounds are converted, without null. Settings that a cluster lacks are left out."""
    found = properties_of(Things, patch_of(Things, "Patch", "A patch.", without=("here",)))
    assert found == {
        "count": {"description": "How many.", "type": "integer", "format": "int64", "minimum": 1, "maximum": 1 << 40},
        "waitSeconds": {
            "description": "How long.", "type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 9,
        },
        "name": {"description": "What.", "type": "string", "pattern": "^a$"},
    }  # fmt: skip


def test_a_stale_file_is_noticed() -> None:
    """Controls: a changed bound, an extra setting, a missing field."""
    text = (
        "spec:\n  scale:\n    type: object\n    properties:\n      min: {type: integer}\n  status:\n    type: object\n"
    )
    assert with_settings(text, "scale", {"min": {"type": "integer"}}) == text
    assert "min: {type: integer, minimum: 1}\n  status" in with_settings(
        text, "scale", {"min": {"type": "integer", "minimum": 1}}
    )
    assert "max: {type: integer}" in with_settings(text, "scale", {"max": {"type": "integer"}})
    with pytest.raises(ValueError, match="no properties of limits"):
        with_settings(text, "limits", {})
