"""`kelvin scale`: which command is meant. Errors of a file name case, step and rule."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kelvin.cli.main import main


def run_scale(command: str, document: object) -> Result:
    """Run the command with `document` on standard input."""
    text = document if isinstance(document, str) else json.dumps(document)
    return CliRunner().invoke(main, ["scale", command, "-"], input=text)


def steps(*steps: object, **case: object) -> dict[str, object]:
    """Return a document with one case of steps."""
    return {"cases": [{"name": "surge", **case, "steps": list(steps)}]}


def ops(*ops: object, **case: object) -> dict[str, object]:
    """Return a document with one case of window operations."""
    return {"cases": [{"name": "tail", **case, "ops": list(ops)}]}


def test_replay_uses_knative_defaults() -> None:
    """An absent or null value is Knative's default. An `update_spec` changes only what it names, before its tick."""
    done = run_scale(
        "replay",
        steps(
            {"t_s": 0, "stable": 71, "ready_pods": 1, "ready_error": None, "update_spec": None},
            {"t_s": 2, "stable": 71, "panic": 9, "ready_pods": 1, "update_spec": {"target_value": 35.5}},
            {"t_s": 4, "ready_pods": 1, "metric_error": True},
            spec={"max_scale_up_rate": 2, "target_burst_capacity": None},
            preset_state=None,
        ),
    )
    assert json.loads(done.stdout) == {
        "cases": [
            {
                "name": "surge",
                "steps": [
                    {"desired": 2, "ebc": -111, "valid": True},
                    {"desired": 2, "ebc": -120, "valid": True},
                    {"desired": 0, "ebc": 0, "valid": False},
                ],
            }
        ]
    }


def test_windows() -> None:
    """The kind and length of a window have defaults."""
    done = run_scale("windows", ops({"op": "record", "t": 1, "v": 3}, {"op": "average", "t": 1.5, "v": None}))
    assert json.loads(done.stdout) == {"cases": [{"name": "tail", "averages": [3.0]}]}


def test_non_finite_average_is_null() -> None:
    """JSON has no infinity, so the average is null."""
    huge = {"op": "record", "t": 1, "v": 1.7e308}
    done = run_scale("windows", ops(huge, huge, {"op": "average", "t": 1}))
    assert json.loads(done.stdout)["cases"][0]["averages"] == [None]


@pytest.mark.parametrize(
    ("command", "document", "want"),
    [
        pytest.param("replay", "{", "not JSON", id="no JSON"),
        pytest.param("replay", '{"cases": [NaN]}', "not JSON", id="not a number"),
        pytest.param("replay", [], 'must be {"cases": [...]}', id="no object"),
        pytest.param("replay", {"cases": [], "more": 1}, "nothing beside", id="something beside the cases"),
        pytest.param("replay", {"cases": [7]}, "case 1: Expected `object`", id="a case that is a number"),
        pytest.param("replay", {"cases": [{}]}, "case 1: Object missing required field `steps`", id="no steps"),
        pytest.param("replay", steps(colour=1), "case 1 ('surge'): Object contains unknown field `colour`", id="key"),
        pytest.param("replay", steps(spec={"target": 1}), "field `target` - at `$.spec`", id="a key of the spec"),
        pytest.param("replay", steps(spec={"scaling_metric": "cpu"}), "'cpu' - at `$.spec.scaling_metric`", id="cpu"),
        pytest.param("replay", steps(spec={"reachable": 1}), "`bool | null`, got `int`", id="a type of the spec"),
        pytest.param("replay", steps(preset_state={"panic": 1}), "`panic` - at `$.preset_state`", id="a preset"),
        pytest.param(
            "replay", steps({"t_s": 0}, {"stable": 1}),
            "case 1 ('surge'), step 2: Object missing required field `t_s`", id="no time",
        ),
        pytest.param("replay", steps({"t_s": "now"}), "step 1: Expected `float`, got `str` - at `$.t_s`", id="type"),
        pytest.param("replay", steps({"t_s": 1e10}), "step 1: Expected `float` <= 9000000000.0", id="too late"),
        pytest.param("replay", steps({"t_s": 1, "ready_pods": 1.5}), "step 1: Expected `int | null`", id="half a pod"),
        pytest.param("replay", steps({"t_s": 1, "now": 1}), "step 1: Object contains unknown field `now`", id="step"),
        pytest.param("windows", ops(window_s=0), "case 1 ('tail'): Expected `float` > 0.0 - at `$.window_s`", id="0 s"),
        pytest.param("windows", ops(granularity_s=0.5), "Expected `float` >= 1.0", id="half a second"),
        pytest.param("windows", ops(window_s=2e6), "window_s=2e+06: must be 1000000 buckets or fewer", id="too long"),
        pytest.param("windows", ops(kind="median"), "Invalid enum value 'median'", id="another kind"),
        pytest.param("windows", ops({"op": "forget", "t": 1}), "op 1: Invalid enum value 'forget'", id="operation"),
        pytest.param("windows", ops({"op": "record", "t": 1}), "op 1: Object missing required field `v`", id="no v"),
    ],
)  # fmt: skip
def test_invalid_scale_case_is_named(command: str, document: object, want: str) -> None:
    """Nothing is printed to standard output, and the exit code is 1."""
    done = run_scale(command, document)
    assert (done.exit_code, done.stdout) == (1, "")
    assert want in done.stderr


@pytest.mark.parametrize(
    ("words", "want"),
    [
        pytest.param(["tinylm", "--min", "1"], "ca.pem does not exist", id="a model's settings"),
        pytest.param(["--min", "1", "tinylm"], "ca.pem does not exist", id="options first"),
        pytest.param(["MODEL", "replay"], "ca.pem does not exist", id="a model whose name is a command"),
        pytest.param(["replay"], "Missing argument 'FILE'", id="a replay of nothing"),
        pytest.param(["replay", "nowhere.json"], "nowhere.json", id="no such file"),
        pytest.param(["tinylm", "--min", "-1"], "--min", id="an invalid setting"),
    ],
)
def test_model_name_is_no_scale_subcommand(words: list[str], want: str, tmp_path: Path) -> None:
    """Settings of a model are sent to the installation. Files are read locally."""
    local = [] if words[0] == "replay" else ["--data", str(tmp_path)]
    done = CliRunner().invoke(main, ["scale", *words, *local])
    assert done.exit_code != 0
    assert want in done.stderr


def test_files_are_of_no_installation() -> None:
    """Commands on local files have no `--url` option."""
    assert "--url" in CliRunner().invoke(main, ["scale", "tinylm", "--help"]).stdout
    for command in ("replay", "windows"):
        assert "--url" not in CliRunner().invoke(main, ["scale", command, "--help"]).stdout
