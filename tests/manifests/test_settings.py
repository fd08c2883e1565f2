"""Every environment variable is a known setting with a valid value, and every command is ours."""

import re

import click
import pytest
from psycopg.conninfo import conninfo_to_dict

from controlplane.knative.policy.knative_service import FEATURES, HOST_PATH, TIMEOUT_S, ZERO_INITIAL_SCALE
from kelvin.cli.main import main
from kelvin.contracts.roles import Role
from kelvin.doctor.configuration_policy import DEFAULTS, KNOWN_SETTINGS
from tests.manifests.kustomize_build import ROOT, Json, containers, find, knative, of_base, plain, pod_of
from tests.manifests.pod_processes import environment_of
from tests.manifests.rules import DIGEST

OTHERS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
BESIDE_BYTES = 3 << 30  # zygote, standby, agent: libraries and the memory of a probe
NOT_OURS_TO_SET = {"KELVIN_LIFELINE_FD", "KELVIN_LISTENER_FD", "KELVIN_POD"}


def unknown(objects: list[Json]) -> list[str]:
    """Return variables of our processes that have no effect."""
    good = (KNOWN_SETTINGS | OTHERS) - NOT_OURS_TO_SET
    return [name for each in containers(objects) for name in environment_of(objects, each) if name not in good]


def unused(objects: list[Json]) -> list[str]:
    """Return settings that their process does not read. A misplaced setting has no effect."""
    found = []
    for each in containers(objects):
        package = ROOT / each["command"][-1] if each.get("command", [""])[0] == "python" else None
        if package is None:
            continue
        shared = [
            ROOT / name
            for name in ("kelvin/ipc", "kelvin/process", "kelvin/crypto", "kelvin/telemetry", "kelvin/contracts")
        ]
        read = "".join(path.read_text() for place in (package, *shared) for path in place.rglob("*.py"))
        given = (name for name in environment_of(objects, each) if name not in OTHERS)
        found += [f"{each['name']}: {name}" for name in given if name not in read]
    return found


def commands(objects: list[Json]) -> list[str]:
    """Return the commands that would not start, each with its fault."""
    found = []
    for each in containers(objects):
        words = [*each.get("command", ()), *each.get("args", ())]
        if words[:3] == ["python", "-P", "-m"] and len(words) == 4:
            if not (ROOT / words[3] / "__main__.py").exists():
                found.append(f"{each['name']}: no program {words[3]}")
        elif words[:1] == ["kelvin"]:
            found += _refused(each["name"], words[1:])
        else:
            found.append(f"{each['name']}: {words}")
    return found


def _refused(name: str, words: list[str]) -> list[str]:
    """Return the fault that the command's parser finds, without running it."""
    command: click.Command = main
    try:
        context = click.Context(main)
        while isinstance(command, click.Group):
            _, found, words = command.resolve_command(context, words)
            assert found is not None
            command = found
        command.make_context(name, list(words))
    except click.ClickException as error:
        return [f"{name}: {error.format_message()}"]
    return []


def room_beside_the_host_tier(objects: list[Json]) -> int:
    """Return the bytes of the engine's container beyond its host tier."""
    pod = pod_of(find(objects, "Deployment", "snapshotter"))
    assert pod is not None
    (engine,) = (each for each in pod["containers"] if each["name"] == "engine")
    limit = engine["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    return (int(limit.removesuffix("Gi")) << 30) - int(environment_of(objects, engine)["KELVIN_HOST_BYTES"])


def test_manifest_settings_are_known() -> None:
    """The process that gets a setting also reads it."""
    assert unknown(of_base()) == []
    assert unused(of_base()) == []


def test_unknown_manifest_setting_is_found() -> None:
    """Control: a misspelt setting, one of another process, and one of a supervisor are found."""
    objects = plain()
    settings = find(objects, "ConfigMap", "kelvin-activator")["data"]
    settings |= {"KELVIN_QUEUE_REQUEST": "1", "KELVIN_LIFELINE_FD": "3", "KELVIN_SEAL_S": "600"}
    assert unknown(objects) == ["KELVIN_QUEUE_REQUEST", "KELVIN_LIFELINE_FD"]
    assert "activator: KELVIN_SEAL_S" in unused(objects)


def test_manifest_commands_are_ours() -> None:
    assert commands(of_base()) == []


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        pytest.param(["python", "-P", "-m", "activater"], "x: no program activater", id="no such program"),
        pytest.param(["python", "-P", "-m", "activator", "--fast"], "x: ['python'", id="an argument of a process"),
        pytest.param(["kelvin", "serve"], "x: No such command", id="no such command"),
        pytest.param(["kelvin", "status", "--fast"], "x: No such option", id="no such option"),
        pytest.param(["sh", "-c", "true"], "x: ['sh'", id="a foreign command"),
    ],
)
def test_unknown_manifest_command_is_found(command: list[str], fault: str) -> None:
    """No command is run."""
    objects = plain()
    next(containers(objects)).update(name="x", command=command)
    assert commands(objects)[0].startswith(fault)


def test_a_drain_is_let_end() -> None:
    """The grace period covers the pause before the drain, the drain, and the last records."""
    objects = of_base()
    pod = pod_of(find(objects, "Deployment", "activator"))
    assert pod is not None
    (container,) = pod["containers"]
    drain_s = int(environment_of(objects, container)["KELVIN_ACTIVATOR_DRAIN_S"])
    pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + 10


def test_memory_holds_what_is_let_in() -> None:
    """The limits of bodies and queues fit twice into an activator's memory, which leaves as much for the process."""
    limit = next(containers(of_base()))["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    held = DEFAULTS["KELVIN_BODY_BYTES_IN_ALL"] + DEFAULTS["KELVIN_QUEUE_BYTES_IN_ALL"]
    assert 2 * held <= int(limit.removesuffix("Gi")) << 30


def test_weights_that_are_judged_fit() -> None:
    """The engine's container has room beside its host tier. Control: a larger host tier does not fit."""
    objects = of_base()
    room = room_beside_the_host_tier(objects)
    assert room >= BESIDE_BYTES
    find(objects, "ConfigMap", "kelvin-engine")["data"]["KELVIN_HOST_BYTES"] = str(16 << 30)
    assert room_beside_the_host_tier(objects) < 0


def test_every_role_has_its_certificate() -> None:
    """Each process mounts the certificate of its own role."""
    for obj in of_base():
        if (pod := pod_of(obj)) is not None:
            role = Role(obj["metadata"]["name"])
            (files,) = [each for each in pod["volumes"] if each["name"] == "inner"]
            assert files["secret"]["secretName"] == f"kelvin-inner-{role}"


def test_what_replicas_are_told() -> None:
    """The image is a digest. Store, addresses and features agree with the other objects."""
    objects = of_base()
    settings = find(objects, "ConfigMap", "kelvin-controlplane")["data"]
    assert DIGEST.fullmatch(settings["KELVIN_CLUSTER_IMAGE"])
    (control,) = [each for each in containers(objects) if each["name"] == "controlplane"]
    store = find(objects, "ConfigMap", "kelvin-snapshotter")["data"]["KELVIN_STORE"]
    assert environment_of(objects, control)["KELVIN_CLUSTER_STORE"] == store
    others = find(objects, "ConfigMap", "kelvin-activator")["data"]
    assert settings["KELVIN_CLUSTER_CONTROL"] == others["KELVIN_CONTROL"]
    assert settings["KELVIN_CLUSTER_SNAPSHOTTER"] == others["KELVIN_SNAPSHOTTER"]
    on = find(knative(), "ConfigMap", "config-features")["data"]
    zero = {ZERO_INITIAL_SCALE} & find(knative(), "ConfigMap", "config-autoscaler")["data"].keys()
    assert zero
    assert set(settings["KELVIN_CLUSTER_FEATURES"].split(",")) == on.keys() | zero
    assert find(objects, "PriorityClass", settings["KELVIN_CLUSTER_PRIORITY_CLASS"])


def test_how_a_database_is_trusted() -> None:
    """It is verified by name, with roots that are in the image. The default path of psycopg's libpq is empty there."""
    settings = find(of_base(), "ConfigMap", "kelvin-controlplane")["data"]
    conninfo = conninfo_to_dict(settings["KELVIN_DATABASE"])
    assert conninfo["sslmode"] == "verify-full"
    assert f"test -s {conninfo['sslrootcert']} " in (ROOT / "Dockerfile").read_text()


def test_what_knative_has_to_allow() -> None:
    """Every field that the renderer uses is enabled, except host paths, and its longest timeout is allowed."""
    on = find(knative(), "ConfigMap", "config-features")["data"]
    wanted = {each.flag for each in FEATURES if each is not HOST_PATH}
    assert wanted == {name for name, value in on.items() if value == "enabled"}
    assert find(knative(), "ConfigMap", "config-autoscaler")["data"][ZERO_INITIAL_SCALE] == "true"
    limits = find(knative(), "ConfigMap", "config-defaults")["data"]
    assert int(limits["max-revision-timeout-seconds"]) >= TIMEOUT_S
    assert int(limits["revision-response-start-timeout-seconds"]) <= int(limits["revision-timeout-seconds"])
    assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in on)
