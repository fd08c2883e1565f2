"""Settings are read once, typed, and refused with their value. Library threads are limited before import."""

import subprocess
import sys
from pathlib import Path

import pytest

from kelvin.contracts.setting_parser import BadSetting
from kelvin.devices.gpu_policy import CudaVisibility
from runtime.app.settings import read_settings, read_visible_gpus


def test_defaults() -> None:
    """Only the data directory is required."""
    settings = read_settings({"KELVIN_DATA": "/d"})
    assert (settings.run, settings.meters, settings.spools) == (Path("/d/run"), Path("/d/run/meters"), Path("/d/spool"))
    assert (settings.lifeline_fd, settings.drain_s, settings.restore_s) == (None, 30, 600.0)


def test_each_variable_is_read() -> None:
    """The tests of `peer_settings.py` cover the addresses and certificates."""
    env = {
        "KELVIN_DATA": "/d", "KELVIN_LIFELINE_FD": "7", "KELVIN_RUNTIME_DRAIN_S": "5", "KELVIN_RESTORE_S": "1.5",
        "KELVIN_FILTERS": "on", "KELVIN_STEP_S": "4.5",
    }  # fmt: skip
    settings = read_settings(env)
    assert (settings.lifeline_fd, settings.drain_s, settings.restore_s, settings.step_s) == (7, 5, 1.5, 4.5)
    assert settings.filters
    assert not read_settings({"KELVIN_DATA": "/d"}).filters


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        pytest.param("KELVIN_DATA", "", "is required", id="no data directory"),
        pytest.param("KELVIN_LIFELINE_FD", "x", "must be a whole number", id="a lifeline in words"),
        pytest.param("KELVIN_RUNTIME_DRAIN_S", "0", "must be 1 or more", id="no time to drain"),
        pytest.param("KELVIN_FILTERS", "yes", "must be one of off, on", id="neither on nor off"),
        pytest.param("KELVIN_RESTORE_S", "inf", "must be finite", id="a restore that may last for ever"),
    ],
)
def test_bad_variable_is_named_with_its_rule(name: str, value: str, rule: str) -> None:
    with pytest.raises(BadSetting) as caught:
        read_settings({"KELVIN_DATA": "/d"} | {name: value})
    assert str(caught.value) == f"{name}={value}: {rule}"


def test_libraries_get_one_thread() -> None:
    """In a new process, reading the settings limits torch to one thread."""
    script = "from runtime.app.settings import from_environment as f; f(); import torch; print(torch.get_num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", script], env={"KELVIN_DATA": "/d", "PATH": "/usr/bin"}, capture_output=True, text=True,
        timeout=120, cwd=Path(__file__).parents[3], check=False,
    )  # fmt: skip
    assert done.stdout == "1\n", done.stderr


def test_empty_visible_devices_is_not_unset() -> None:
    assert read_visible_gpus({}) == CudaVisibility(None, None)
    assert read_visible_gpus({"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == CudaVisibility(
        "", "PCI_BUS_ID"
    )
