"""Unknown settings and contradictory settings are reported."""

import pytest

from kelvin.doctor.configuration_policy import judge_names, judge_values
from kelvin.doctor.finding_policy import FindingLevel

MEMORY_BYTES, CORES = 24 << 30, 2


@pytest.mark.parametrize(
    ("name", "near"),
    [
        pytest.param("KELVIN_DEVICE_SLOT", "KELVIN_DEVICE_SLOTS", id="a letter is missing"),
        pytest.param("KELVIN_HOSTBYTES", "KELVIN_HOST_BYTES", id="an underscore is missing"),
    ],
)
def test_misspelt_setting_names_its_neighbour(name: str, near: str) -> None:
    """The finding suggests the similar setting."""
    (found,) = judge_names([name, "PATH", "KELVIN_PORT"])
    assert found.level is FindingLevel.WARN
    assert name in found.seen
    assert f"perhaps {near}" in found.mend


@pytest.mark.parametrize("name", ["KELVIN_METRICS_S", "KELVIN_FORESIGHT_S", "KELVIN_HTTP2_STREAMS"])
def test_unknown_setting_is_to_be_unset(name: str) -> None:
    """A setting of an earlier release has no similar name, so the fix is to unset it."""
    (found,) = judge_names([name])
    assert (found.level, found.mend) == (FindingLevel.WARN, "unset it")


def test_known_and_foreign_names_pass() -> None:
    """Known settings and variables of other programs are fine."""
    (found,) = judge_names(["KELVIN_PORT", "HOME", "AWS_REGION"])
    assert found.level is FindingLevel.OK


@pytest.mark.parametrize(
    ("env", "level", "text"),
    [
        pytest.param({}, FindingLevel.OK, "no value contradicts", id="defaults agree"),
        pytest.param(
            {"KELVIN_ACTIVATOR_DRAIN_S": "60"}, FindingLevel.WARN, "KELVIN_DRAIN_S=45", id="a drain that is cut"
        ),
        pytest.param(
            {"KELVIN_DRAIN_S": "10"}, FindingLevel.WARN, "KELVIN_RUNTIME_DRAIN_S=30", id="the other way round"
        ),
        pytest.param({"KELVIN_BODY_BYTES": str(1 << 30)}, FindingLevel.FAIL, "IN_ALL", id="a body that never fits"),
        pytest.param(
            {"KELVIN_QUEUE_REQUESTS": "9999"},
            FindingLevel.WARN,
            "=9999 is above",
            id="a queue larger than the common one",
        ),
        pytest.param({"KELVIN_QUEUE_TOKENS_PER_TENANT": "1"}, FindingLevel.WARN, "_TENANT=1", id="less per tenant"),
        pytest.param({"KELVIN_QUEUE_BYTES_IN_ALL": "1024"}, FindingLevel.WARN, "_IN_ALL=1024", id="less in common"),
        pytest.param(
            {"KELVIN_DEADLINE_S": "60"}, FindingLevel.NOTE, "KELVIN_QUEUE_S=600", id="a wait past the deadline"
        ),
        pytest.param(
            {"KELVIN_PACK_BYTES": "4096"}, FindingLevel.WARN, "KELVIN_CHUNK_BYTES", id="packs smaller than chunks"
        ),
        pytest.param(
            {"KELVIN_REQUESTS": "9000"},
            FindingLevel.NOTE,
            "KELVIN_CONNECTIONS=8192",
            id="more requests than connections",
        ),
        pytest.param({"KELVIN_THREADS": "8"}, FindingLevel.WARN, "on 2 cores", id="more threads than cores"),
        pytest.param({"KELVIN_KV_BYTES": str(8 << 30)}, FindingLevel.NOTE, "come to", id="more memory than there is"),
        pytest.param({"KELVIN_LOG_LEVEL": "debug"}, FindingLevel.NOTE, "debug", id="debug"),
        pytest.param({"KELVIN_DRAIN_S": "soon"}, FindingLevel.OK, "no value", id="a bad number is left to the service"),
    ],
)
def test_contradictory_values_name_the_worst(env: dict[str, str], level: FindingLevel, text: str) -> None:
    """The worst contradiction is reported, with cost and fix."""
    findings = judge_values(env, MEMORY_BYTES, CORES)
    assert any(found.level is level and text in found.seen for found in findings), findings
    if level is not FindingLevel.OK:
        assert all(found.cost and found.mend for found in findings)
