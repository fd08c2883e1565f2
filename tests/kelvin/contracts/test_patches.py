"""A patch has the settings and bounds of its struct, and distinguishes an omitted setting from null."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from kelvin.contracts.patches import patch_of


class Things(msgspec.Struct, frozen=True):
    """A struct with three settings."""

    max: Annotated[int, Meta(ge=1, le=9, description="At most.")] = 1
    rate: Annotated[float, Meta(gt=0, description="A second.")] | None = None
    mode: Annotated[Literal["slow", "fast"], Meta(description="How.")] = "slow"


Patch = patch_of(Things, "Patch", "Some of the things.")


@pytest.mark.parametrize("given", [{}, {"max": 3}, {"rate": None}, {"rate": 2.5, "mode": "fast"}])
def test_only_stated_settings_change(given: dict[str, Any]) -> None:
    """Null is a given value. An omitted setting isn't given."""
    patch = msgspec.convert(given, Patch)
    assert patch.stated_values() == given
    assert msgspec.json.decode(msgspec.json.encode(patch)) == given


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"max": 0}, id="below the minimum"),
        pytest.param({"max": 10}, id="above the maximum"),
        pytest.param({"max": None}, id="null where it isn't allowed"),
        pytest.param({"rate": 0}, id="not above an exclusive minimum"),
        pytest.param({"mode": "other"}, id="not one of the choices"),
        pytest.param({"least": 1}, id="an unknown setting"),
    ],
)
def test_patch_that_breaks_the_rules_of_the_struct_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, Patch)


def test_a_part_by_other_names_without_bounds() -> None:
    """A patch type can rename or omit settings and drop bounds, as Kubernetes objects need it. Types are checked."""
    part = patch_of(Things, "Part", "Of a cluster.", bounded=False, without=("mode",), rename=str.upper)
    assert msgspec.convert({"MAX": 10}, part).stated_values() == {"max": 10}
    for wrong in ({"max": 1}, {"MODE": "slow"}, {"MAX": "1"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, part)


def test_schema_of_a_patch_has_descriptions() -> None:
    """The generated schema has the patch's name and description, and each setting's description."""
    _, found = msgspec.json.schema_components((Patch,))
    assert found["Patch"]["description"] == "Some of the things."
    assert found["Patch"]["properties"]["max"] == {
        "type": "integer", "minimum": 1, "maximum": 9, "description": "At most.",
    }  # fmt: skip
    assert found["Patch"]["required"] == []
