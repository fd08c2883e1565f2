"""Run a container of a manifest as a local process: command, environment, files and probes.

Mounts become folders below a directory, and paths in values are changed accordingly. Ports are replaced by free ones,
and service names by local addresses.
"""

import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from coldstart_bench.harness.installation import free_ports
from tests.manifests.kustomize_build import ROOT, Json, pod_of
from tests.unclean_exit import find_unclean_exit

READY_S: Final = 90.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class LocalPaths:
    """The local stand-ins for the cluster's things.

    `secrets` has files by name, for each secret. `ports` are by workload and container port. `instead` maps parts of
    values to their local replacements.
    """

    place: Path
    secrets: Mapping[str, Mapping[str, bytes]]
    ports: Mapping[tuple[str, int], int]
    instead: Mapping[str, str]
    beside: Mapping[str, str] = field(default_factory=dict)  # variables that replace files of a cluster


@dataclass(frozen=True, slots=True)
class RunningContainer:
    """A container that runs as a process."""

    name: str
    container: Json
    process: subprocess.Popen[bytes]
    ports: Mapping[str, int]  # by name
    log: Path
    paths: Mapping[str, Path]  # local path of each mount path

    def probe(self, which: str) -> int | None:
        """Return the status of a probe, or None if there is no answer."""
        if (command := self.container[which].get("exec")) is not None:
            words = [_within(word, self.paths) for word in command["command"]]
            words[0] = sys.executable if words[0] == "python" else words[0]
            done = subprocess.run(words, capture_output=True, timeout=60, check=False)
            return 200 if done.returncode == 0 else None
        asked = self.container[which]["httpGet"]
        try:
            return self._ask(asked["port"], asked["path"])[0]
        except (OSError, http.client.HTTPException):
            return None

    def page(self) -> str:
        """Return its metrics page, which is on the health port."""
        return self._ask("health", "/metrics")[1].decode()

    def _ask(self, port: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[port], timeout=10)
        try:
            connection.request("GET", path, headers={"User-Agent": "kube-probe/1.32"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def until(self, which: str) -> None:
        """Wait until the probe passes. A process that ends, or takes too long, fails the test with its last log
        lines.
        """
        limit = time.monotonic() + READY_S
        while (answer := self.probe(which)) != 200:
            said = self.log.read_text()[-3000:]
            assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{said}"
            assert time.monotonic() < limit, f"{self.name}: {which} is answered {answer}:\n{said}"
            time.sleep(_POLL_S)


def ports_of(objects: list[Json]) -> dict[tuple[str, int], int]:
    """Return a free port for each port of each container."""
    ports = [
        (obj["metadata"]["name"], port["containerPort"])
        for obj in objects
        for each in (pod_of(obj) or {"containers": ()})["containers"]
        for port in each.get("ports", ())
    ]
    return dict(zip(ports, free_ports(len(ports)), strict=True))


@contextlib.contextmanager
def running(
    objects: list[Json],
    name: str,
    here: LocalPaths,
    which: str | None = None,
    *,
    ended_by: signal.Signals = signal.SIGTERM,
) -> Iterator[RunningContainer]:
    """Run a container of a Deployment or DaemonSet, named like it unless `which` is given. It is ended with SIGTERM,
    and must exit with 0 and a clean log. A volume that several containers mount is one directory and outlives each of
    them.
    """
    (pod,) = (pod_of(each) for each in objects if pod_of(each) and each["metadata"]["name"] == name)
    assert pod is not None
    (container,) = (each for each in pod["containers"] if each["name"] == (which or name))
    root = here.place / name / container["name"]
    paths = _mounted(pod, container, root, here.secrets)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("KELVIN_", "AWS_"))},
        **{key: _moved(value, name, paths, here) for key, value in environment_of(objects, container, here).items()},
        **here.beside,
    }
    log = root / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command_of(container, paths), env=environment, cwd=ROOT, stdout=sink, stderr=sink)
    ports = {each["name"]: here.ports[name, each["containerPort"]] for each in container.get("ports", ())}
    try:
        yield RunningContainer(container["name"], container, process, ports, log, paths)
        process.send_signal(ended_by)
        assert process.wait(60) == 0, log.read_text()[-3000:]
        left = find_unclean_exit(log.read_text())
        assert left == [], "\n".join(left)
    finally:
        process.kill()
        process.wait()


def command_of(container: Json, paths: Mapping[str, Path]) -> list[str]:
    """Return the container's command with our interpreter."""
    words = [_within(word, paths) for word in (*container.get("command", ()), *container.get("args", ()))]
    assert words[0] in ("python", "kelvin"), words
    return (
        [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", "kelvin.cli.main", *words[1:]]
    )


def environment_of(objects: list[Json], container: Json, here: LocalPaths | None = None) -> dict[str, str]:
    """Return the environment as Kubernetes builds it: `envFrom` first, then `env`. Without `here` a secret's value is
    its name.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        wanted = source["configMapRef"]["name"]
        (settings,) = [o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == wanted]
        found |= settings["data"]
    for each in container.get("env", ()):
        if "value" in each:
            found[each["name"]] = each["value"]
            continue
        if (about := each["valueFrom"].get("fieldRef")) is not None:
            assert about["fieldPath"] == "metadata.name"
            found[each["name"]] = pod_name(container["name"])
            continue
        if (wanted := each["valueFrom"].get("configMapKeyRef")) is not None:
            (settings,) = [o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == wanted["name"]]
            found[each["name"]] = settings["data"][wanted["key"]]
            continue
        secret = each["valueFrom"]["secretKeyRef"]
        if here is None:
            found[each["name"]] = secret["name"]
        elif secret["name"] in here.secrets:
            found[each["name"]] = here.secrets[secret["name"]][secret["key"]].decode()
        else:
            assert secret.get("optional"), f"no secret {secret['name']}"
    return found


def pod_name(workload: str) -> str:
    """Return the name of a workload's only local pod."""
    return f"{workload}-0"


def _mounted(pod: Json, container: Json, root: Path, secrets: Mapping[str, Mapping[str, bytes]]) -> dict[str, Path]:
    """Return the local path of each mount. A file mount is copied, which is as good as read-only."""
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = Counter(mount["name"] for each in pod["containers"] for mount in each["volumeMounts"])
    paths: dict[str, Path] = {}
    for mount in sorted(container["volumeMounts"], key=lambda each: len(each["mountPath"])):
        path = root / mount["mountPath"].lstrip("/")
        paths[mount["mountPath"]] = path
        secret = volumes[mount["name"]].get("secret")
        if "subPath" in mount:
            path.write_bytes(secrets[secret["secretName"]][mount["subPath"]])
            continue
        if secret is None and mounts[mount["name"]] > 1:
            (shared := root.parent / f"{mount['name']}.shared").mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(shared)
            continue
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        for file, content in secrets[secret["secretName"]].items() if secret is not None else ():
            (path / file).write_bytes(content)
    return paths


def _within(word: str, paths: Mapping[str, Path]) -> str:
    """Replace each mount path in the word by its local path."""
    for mount, path in paths.items():
        word = word.replace(mount, str(path)) if mount != "/tmp" else word
    return word


def _moved(value: str, name: str, paths: Mapping[str, Path], here: LocalPaths) -> str:
    for mount, path in paths.items():
        if value == mount or value.startswith(f"{mount}/"):
            return str(path) + value.removeprefix(mount)
    value = re.sub(
        r"([a-z-]+)\.kelvin\.svc:(\d+)", lambda found: f"127.0.0.1:{here.ports[found[1], int(found[2])]}", value
    )
    if found := re.fullmatch(r"0\.0\.0\.0:(\d+)", value):
        return f"127.0.0.1:{here.ports[name, int(found[1])]}"
    if value.isdecimal() and (name, int(value)) in here.ports:
        return str(here.ports[name, int(value)])
    for part, other in here.instead.items():
        value = value.replace(part, other)
    return value
