"""Which versions have a Service and how it is rendered: named versions, and for a while those named before."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from controlplane.knative.policy.knative_service import ClusterSpec, PodVersion, render_service, service_name
from controlplane.knative.services import service_renderer
from controlplane.knative.services.service_renderer import ServiceRenderer, versions_with_service
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.registry.policy.version_lifecycle import VersionState
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.errors import Internal, Refused
from tests.controlplane.builders import NOW_S, digest, key, registration

CLUSTER = ClusterSpec(image="registry.example/kelvin@sha256:" + "0" * 64, store_url="s3://models/prod")


def model(prod: str = "a", versions: str = "ab", *, tenant: str = "default", name: str = "m", **more: Any) -> Model:
    """Return a model with one version per letter."""
    made = tuple(Version(registration(name, each, tenant=tenant), NOW_S, VersionState.READY) for each in versions)
    return replace(Model(tenant, name, NOW_S, aliases={"prod": digest(prod)}, versions=made), **more)


OVERLAP = model("b", meanwhile={digest("b"): digest("a")})


def rendering(own: str = "kelvin", devices: int | None = None) -> ServiceRenderer:
    return ServiceRenderer(CLUSTER, own, kv_bytes=512 << 20, devices=devices)


def _letters(it: Model, there: str = "", ready: str = "", awake: str = "", *, settled_in: bool = True) -> str:
    def among(letters: str) -> Callable[[VersionKey], bool]:
        return lambda of: of.version[0] in letters

    return "".join(
        v.key.version[0]
        for _, v in versions_with_service([it], among(there), among(ready), among(awake), lambda _: settled_in)
    )


@pytest.mark.parametrize(
    ("it", "there", "ready", "awake", "want"),
    [
        pytest.param(model("a"), "", "", "", "a", id="the version of prod and no other"),
        pytest.param(model("b"), "a", "a", "", "ba", id="the previous one until the new one was ready"),
        pytest.param(model("b"), "ab", "ab", "ab", "b", id="the previous one goes then"),
        pytest.param(OVERLAP, "ab", "ab", "ab", "ba", id="the previous one stays during an overlap"),
        pytest.param(OVERLAP, "ab", "ab", "b", "b", id="the overlap ends with its last pod"),
        pytest.param(model("b"), "", "", "", "b", id="a previous one without a Service gets none"),
        pytest.param(
            model("a", "abc", aliases={"prod": digest("a"), "next": digest("b")}), "", "", "", "ab", id="each alias"
        ),
        pytest.param(
            model("a", "abc", split={digest("a"): 9, digest("c"): 1}), "abc", "a", "", "acb",
            id="a split; one more stays until all of it was ready",
        ),
        pytest.param(
            replace(model("a"), versions=tuple(replace(v, state=VersionState.DELETED) for v in model("a").versions)),
            "ab", "", "", "", id="no deleted version, also if it is named",
        ),
        pytest.param(model("a", ""), "", "", "", "", id="a model without versions"),
    ],
)  # fmt: skip
def test_old_version_keeps_its_service_by_the_rules(it: Model, there: str, ready: str, awake: str, want: str) -> None:
    """The rule uses aliases, existing Services, readiness so far, and pods."""
    assert _letters(it, there, ready, awake) == want


def test_defect_of_one_version_affects_no_other_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that can't be rendered fails alone."""
    good, bad = model(name="good"), model(name="bad")

    def broken(pod: PodVersion, cluster: ClusterSpec) -> dict[str, Any]:
        if pod.model == "bad":
            raise ZeroDivisionError
        return render_service(pod, cluster)

    monkeypatch.setattr(service_renderer, "render_service", broken)
    every = [(each, each.versions[0]) for each in (bad, good)]
    objects, failed = rendering().render_all(every, lambda _: False)
    assert [each["kind"] for each in objects] == ["Service"]
    assert failed == {bad.versions[0].key: Internal()}


def test_takeover_keeps_versions_with_pods() -> None:
    """A new control plane removes no Service that may be in use. A deleted version's Service goes."""
    assert _letters(model("b"), "ab", "ab", "ab", settled_in=False) == "ba"
    assert _letters(model("b"), "ab", "ab", "b", settled_in=False) == "b"
    deleted = replace(model("b"), versions=tuple(replace(v, state=VersionState.DELETED) for v in model("b").versions))
    assert _letters(deleted, "ab", "ab", "ab", settled_in=False) == ""


def test_service_is_rendered_once_per_version() -> None:
    """Each Service is in its tenant's namespace with its model's scale. An unchanged version is not rendered again."""
    scale = ScaleSettings(min=1, max=3, target=4.0, window_s=30.0, grace_s=10.0)
    models = [model(versions="a", scale=scale), model(name="n", versions="a"), model(tenant="acme", versions="a")]
    it = rendering()
    every = [(each, each.versions[0]) for each in models]
    objects, failed = it.render_all(every, lambda tenant: False)
    assert not failed
    heads = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    name, other = service_name("m", digest("a")), service_name("n", digest("a"))
    assert heads == [
        ("Service", "kelvin-default", name),
        ("Service", "kelvin-default", other),
        ("Service", "kelvin-acme", name),
    ]
    assert all(each["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "kelvin" for each in objects)
    notes = objects[0]["spec"]["template"]["metadata"]["annotations"]
    assert {key.partition("/")[2]: value for key, value in notes.items() if "autoscaling" in key}.items() >= {
        "min-scale": "1", "max-scale": "3", "target": "4", "window": "30s", "scale-to-zero-pod-retention-period": "10s",
    }.items()  # fmt: skip
    assert objects[0]["spec"]["template"]["spec"]["containerConcurrency"] == 72
    assert it.key_by_service["kelvin-acme", name] == VersionKey("acme", "m", digest("a"))
    again, _ = it.render_all(every, lambda tenant: False)
    assert again[0] is objects[0], "an unchanged Service is not rendered again"


def test_suspended_tenant_keeps_no_minimum() -> None:
    it = model(versions="a", scale=ScaleSettings(min=2, max=3))
    for suspended, least in ((False, "2"), (True, "0"), (False, "2")):
        suspects = {"default"} if suspended else set[str]()
        objects, _ = rendering().render_all([(it, it.versions[0])], suspects.__contains__)
        notes = objects[0]["spec"]["template"]["metadata"]["annotations"]
        assert notes["autoscaling.knative.dev/min-scale"] == least


def most_of(it: ServiceRenderer, *models: Model, old: str = "") -> list[str]:
    """Return the `max-scale` of each version with a Service, in the order of the models."""
    every = list(
        versions_with_service(
            models, lambda key: key.version[0] in old, lambda key: False, lambda key: False, lambda _: True
        )
    )
    objects, failed = it.render_all(every, lambda tenant: False)
    assert not failed
    services = [each for each in objects if each["kind"] == "Service"]
    return [
        each["spec"]["template"]["metadata"]["annotations"]["autoscaling.knative.dev/max-scale"] for each in services
    ]


def test_devices_are_divided_oldest_model_first() -> None:
    """The oldest model gets its part first, whatever its name. Later ones get the rest, at least one. A deploy changes
    no part.
    """
    first = model(name="z", scale=ScaleSettings(max=6))
    second = model(name="b", created_at_s=NOW_S + 1, scale=ScaleSettings(max=4))
    third = model(name="a", created_at_s=NOW_S + 2, scale=ScaleSettings(max=4))
    assert most_of(rendering(), third, second, first) == ["4", "4", "6"], "without a limit each has its own maximum"
    it = rendering(devices=8)
    assert most_of(it, first, second) == ["6", "2"]
    assert most_of(it, third, second, first) == ["1", "2", "6"]
    deployed = replace(first, aliases={"prod": digest("b")})
    assert most_of(it, third, second, deployed, old="a") == ["1", "2", "6", "6"], "a leaving version is not counted"
    split = replace(first, split={digest("a"): 9, digest("b"): 1})
    assert most_of(it, third, second, split) == ["1", "1", "6", "2"], "a second version that stays is counted"


@pytest.mark.parametrize(
    ("it", "says"),
    [
        pytest.param(model(tenant="t" * 60, versions="a"), "namespace", id="an invalid namespace"),
        pytest.param(model(tenant="system", versions="a"), "Kelvin itself", id="Kelvin's own namespace"),
        pytest.param(model(versions="a", scale=ScaleSettings(window_s=30.5)), "window_s", id="a fraction of a second"),
        pytest.param(model(name="x" * 50 + "other", versions="a"), "same name", id="the name of another version"),
    ],
)
def test_unrenderable_version_fails_alone(it: Model, says: str) -> None:
    """The failure is that version's, and the others are rendered."""
    fine = model(name="x" * 50, versions="a")
    every = [(each, each.versions[0]) for each in (fine, it)]
    objects, failed = rendering("kelvin-system").render_all(every, lambda tenant: False)
    assert [each["metadata"]["name"] for each in objects] == [service_name("x" * 50, digest("a"))]
    assert [(of.tenant, of.model) for of in failed] == [(it.tenant, it.model)]
    assert all(says in failure.message for failure in failed.values())


def test_scale_unsupported_on_a_cluster_is_refused() -> None:
    """The error has the rule, and the setting is not stored."""
    rendering().check(model(), ScaleSettings(min=1, max=2, target=0.01, window_s=30.0))
    for scale, says in (
        (ScaleSettings(idle="sleep"), "idle=sleep: must be zero on a cluster"),
        (ScaleSettings(min=9, max=9), "min=9: must be 8 or less: there are no more devices"),
        (ScaleSettings(window_s=30.5), "window_s=30.5: must be whole seconds"),
        (ScaleSettings(grace_s=0.5), "grace_s=0.5: must be whole seconds"),
        (ScaleSettings(target=0.005), "target=0.005: must be 0.01 or more on a cluster"),
    ):
        with pytest.raises(Refused) as refused:
            rendering(devices=8).check(model(), scale)
        assert says in refused.value.failure.message
    assert key() == model().versions[0].key
