"""Generate the settings in `manifests/crds` from their structs: see `kelvin/contracts/patches.py`.

`python -m tests.manifests.crds` writes the files.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from controlplane.knative.policy import custom_resources
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.serving.control_messages import TenantLimits

CRDS: Final = Path(__file__).parents[2] / "manifests" / "crds"
# The file, the field of the spec, the struct with its settings, and the settings that a cluster supports.
PLACES: Final = (
    ("models.yaml", "scale", ScaleSettings, custom_resources.Scale),
    ("tenants.yaml", "limits", TenantLimits, custom_resources.Limits),
)
_INT32_MAX: Final = (1 << 31) - 1


def with_settings(text: str, field: str, properties: dict[str, Any]) -> str:
    """Return a CRD's text with these properties of the field. Raises ValueError if the text lacks the field."""
    found = re.search(rf"^( +){field}:\n(?:\1  .*\n)*?\1  properties:\n((?:\1    .*\n)+)", text, flags=re.M)
    if found is None:
        raise ValueError(f"no properties of {field}")
    lines = (f"{found[1]}    {name}: {_flow(each)}\n" for name, each in properties.items())
    return text[: found.start(2)] + "".join(lines) + text[found.end(2) :]


def properties_of(settings: type[msgspec.Struct], patch: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the schemas of the patch's settings by their names in an object, as Kubernetes writes schemas."""
    _, components = msgspec.json.schema_components((settings,))
    stated = components[settings.__name__]["properties"]
    return {custom_resources.to_camel_case(name): dict(_kubernetes(stated[name])) for name in patch.__struct_fields__}


def _kubernetes(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a JSON schema in OpenAPI 3.0 form, without null and defaults, since a missing field means no change."""
    (schema,) = (each for each in schema.get("anyOf", [schema]) if each.get("type") != "null")
    yield "description", schema["description"]
    yield "type", schema.get("type", "string")
    if schema.get("maximum", 0) > _INT32_MAX:
        yield "format", "int64"
    for name, value in schema.items():
        if name == "exclusiveMinimum":
            yield from (("minimum", value), ("exclusiveMinimum", True))
        elif name == "pattern":
            yield name, value.removesuffix(r"(?!\n)")  # there `$` matches only the end of the text
        elif name not in ("description", "type", "default"):
            yield name, value


def _flow(schema: dict[str, Any]) -> str:
    dumped = yaml.safe_dump(schema, default_flow_style=True, sort_keys=False, width=10_000)
    return dumped.strip()


def main() -> None:
    """Write the files."""
    for name, field, settings, patch in PLACES:
        path = CRDS / name
        path.write_text(with_settings(path.read_text(), field, properties_of(settings, patch)))


if __name__ == "__main__":
    main()
