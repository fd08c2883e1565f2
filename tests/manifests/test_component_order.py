"""Components combined in the order of the docs' table: each still has its effect."""

import itertools
import re
from typing import Final

import pytest

from tests.manifests import rules
from tests.manifests.component_effects import AGENT, AGENTS, EFFECTS, PARKED, container, env_of, renders
from tests.manifests.kustomize_build import ROOT, STORE_AT, Json, build_with_components, knative, kustomize
from tests.manifests.network_reach import may
from tests.manifests.pod_processes import environment_of
from tests.manifests.schemas import problems
from tests.manifests.test_network_reach import OUTSIDE, REPLICA, SNAPSHOTTER
from tests.manifests.test_overlays import COMPONENTS, GIVEN_UP, VERSIONED
from tests.manifests.test_settings import commands, unknown, unused

pytestmark = pytest.mark.skipif(kustomize() is None, reason="no kustomize 5: kubectl 1.27 or later has it")

_ROW: Final = re.compile(r"^\| ((?:`[a-z-]+`(?:, )?)+) \|", re.MULTILINE)


PAGE: Final = (ROOT / "docs" / "operations" / "cluster-install.md").read_text()


def rows() -> list[list[str]]:
    """Return the components in the docs' order. Those in one row exclude each other."""
    found = [
        re.findall(r"`([a-z-]+)`", cell) for cell in _ROW.findall(PAGE.partition("\n| `base`")[2].partition("\n\n")[0])
    ]
    return [names for row in found if (names := [name for name in row if name in COMPONENTS])]


ROWS: Final = rows()
PAIRS: Final = [pair for one, other in itertools.combinations(ROWS, 2) for pair in itertools.product(one, other)]
ALL: Final = list(itertools.product(*ROWS))


def _wrong(objects: list[Json], names: tuple[str, ...]) -> list[str]:
    given_up = {each for name in names for each in GIVEN_UP.get(name, ())}
    ours = [each for each in objects if each["kind"] != "StatefulSet"]
    images = re.compile(rf"images: [a-z0-9]+: ({VERSIONED.pattern})")
    return [
        *(each for obj in objects for each in problems(obj)),
        *(each for each in rules.find_broken_rules(objects) if each not in given_up and images.fullmatch(each) is None),
        *(each for check in (unknown, unused, commands) for each in check(ours)),
        *(f"{name} {number}" for number, (name, does) in enumerate(EFFECTS) if name in names and not does(objects)),
    ]


def test_every_component_has_its_order() -> None:
    """The table has every component once."""
    assert sorted(itertools.chain(*ROWS)) == COMPONENTS


@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_all_at_once(names: tuple[str, ...]) -> None:
    """A later component undoes nothing of an earlier one."""
    assert _wrong(build_with_components(*names), names) == []


def test_wrong_component_order_is_found() -> None:
    """Control: a component that the table puts last has no effect if it comes first."""
    assert _wrong(build_with_components("spot", "gpu"), ("spot", "gpu")) == ["spot 14"]


@pytest.mark.deep
@pytest.mark.parametrize("names", PAIRS, ids=" ".join)
def test_two_at_once(names: tuple[str, ...]) -> None:
    """Each pair works without the other components."""
    assert _wrong(build_with_components(*names), names) == []


OWN: Final = """configMapGenerator:
  - {name: kelvin-snapshotter, namespace: kelvin, behavior: merge, literals: ["KELVIN_STORE=s3://ours/versions"]}
  - {name: kelvin-controlplane, namespace: kelvin, behavior: merge, literals: [
      "KELVIN_CLUSTER_DEVICE=nvidia.com/mig-3g.40gb"]}
"""


BLOCKS: Final = re.findall(r"^```\n(patches:\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_what_an_overlay_says_itself() -> None:
    """An overlay's settings come before its components, which use or override them. A patch comes last."""
    (profile,) = BLOCKS
    both = ("cache-agent", "mig")
    objects = build_with_components(*both, more=OWN + profile)
    assert renders(objects).device == "nvidia.com/mig-2g.20gb"
    assert env_of(objects, "cache-agent", AGENTS)["KELVIN_STORE"] == renders(objects).store_url == "s3://ours/versions"
    assert renders(build_with_components(*both, more=OWN)).device == "nvidia.com/mig-1g.10gb"


@pytest.mark.parametrize("port", [9000, 8443])
def test_policies_follow_the_store_s_port(port: int) -> None:
    """The overlay names the store once. All its readers use it and may reach its port only."""
    url = f"s3://ours/versions?endpoint=https://s3.example.com:{port}"
    objects = build_with_components("pools", "cache-agent", "store-port", more=STORE_AT.format(url=url))
    agent = env_of(objects, "cache-agent", AGENTS)["KELVIN_STORE"]
    engine = environment_of(objects, container(objects, "snapshotter", "engine"))["KELVIN_STORE"]
    assert {renders(objects).store_url, env_of(objects, "snapshotter")["KELVIN_STORE"], agent, engine} == {url}
    for each in (SNAPSHOTTER, REPLICA, PARKED, AGENT):
        assert [number for number in (443, 8443, 9000) if may(objects, each, OUTSIDE, number)] == [port]
    assert rules.find_broken_rules(objects) == GIVEN_UP["cache-agent"]


def test_a_store_without_a_port_is_refused_where_policies_follow_it() -> None:
    """The build fails with the value, so no policy with a wrong port is applied."""
    with pytest.raises(AssertionError, match="out of bounds for value s3://ours/versions"):
        build_with_components("store-port", more=STORE_AT.format(url="s3://ours/versions"))


def _yours(objects: list[Json]) -> set[str]:
    """Return the names that an installation has to supply, or shares with other software."""
    found: set[str] = set()
    for each in objects:
        name, home = each["metadata"]["name"], each["metadata"].get("namespace", "")
        if home and not home.startswith("kelvin"):
            found |= {home, name}
        if each["kind"] in ("ClusterIssuer", "PriorityClass", "PersistentVolumeClaim"):
            found.add(name)
        if each.get("spec", {}).get("volumeClaimTemplates"):
            found.add(name)
        for setting, value in each.get("data", {}).items():
            if "example.com" in value:
                found |= {setting, name.rpartition("-")[0]}  # without its content hash
        for way in ("ingress", "egress") if each["kind"] == "NetworkPolicy" else ():
            for rule in each["spec"].get(way, ()):
                found |= {part for peer in rule.get("from", rule.get("to", ())) for part in _others(peer)}
    return found


def _others(peer: Json) -> set[str]:
    """Return a foreign namespace in the rule, and the labels of its pods."""
    home = peer.get("namespaceSelector", {}).get("matchLabels", {}).get("kubernetes.io/metadata.name", "kelvin")
    if home.startswith("kelvin"):
        return set()
    return {home, *(f"{name}: {value}" for name, value in peer["podSelector"]["matchLabels"].items())}


@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_what_is_yours_to_say(names: tuple[str, ...]) -> None:
    """The docs name each of them."""
    yours = _yours([*build_with_components(*names), *knative()])
    assert {"KELVIN_DOMAIN", "config-features", "app: istiod", "kelvin-inner", "snapshotter", "postgres"} <= yours
    assert [each for each in sorted(yours) if f"`{each}`" not in PAGE] == []
