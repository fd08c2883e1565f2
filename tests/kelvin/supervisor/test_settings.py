"""Settings that `kelvin runtime` passes to its processes, which may have another working directory."""

from pathlib import Path

import pytest

from kelvin.contracts.artifacts.runtime_control import BindRequest
from kelvin.contracts.setting_parser import BadSetting
from kelvin.supervisor.settings import PodSettings, load_pod

BIND = BindRequest(tenant="acme", model="m", version="f" * 64, device_class="cpu-1", threads=1, kv_bytes=0)


def loaded(cache: Path | None, **env: str) -> PodSettings:
    return load_pod(Path("data"), BIND, "rt-1", "127.0.0.1", None, 8080, cache, env)


def test_paths_of_the_command_line_are_absolute_for_others() -> None:
    """The data directory and the node's agent are made absolute. With a node's agent, the pod has none of its own."""
    settings = loaded(Path("node/run"))
    assert settings.data == Path.cwd() / "data"
    assert Path(settings.pod.agent) == Path.cwd() / "node/run"
    assert not settings.has_agent


def test_the_environment_says_absolute_paths() -> None:
    """The environment may come from another directory, so relative paths are refused. Control: an absolute one."""
    with pytest.raises(BadSetting, match="KELVIN_CACHE_AGENT=node/run: must be an absolute path"):
        loaded(None, KELVIN_CACHE_AGENT="node/run")
    assert loaded(None, KELVIN_CACHE_AGENT="/node/run").pod.agent == "/node/run"
