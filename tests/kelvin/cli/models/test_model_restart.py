"""`kelvin models restart` against scripted API responses. `tests/e2e` covers a real installation."""

import json

import httpx
import pytest
from click.testing import CliRunner

from kelvin.cli.models.model_commands import restart_command
from kelvin.contracts.errors import RemoteFailure
from kelvin.contracts.problem import problem_details
from tests.kelvin.cli_targets import installation_answering


def reply(state: str, replaced: int = 0, order: str = "o1", reason: str | None = None) -> dict[str, object]:
    return {"order": order, "state": state, "replicas": 2, "replaced": replaced, "reason": reason}


def problem(status: int, detail: str) -> httpx.Response:
    return httpx.Response(status, content=problem_details(RemoteFailure("refused", status, detail)))


@pytest.mark.parametrize(
    ("answers", "status", "output"),
    [
        pytest.param(
            [reply("running"), reply("running", 1), reply("running", 1), reply("done", 2)],
            0,
            "1 of 2 replicas replaced\n2 of 2 replicas replaced\nm: restarted, 2 of 2 replicas replaced\n",
            id="progress once for each replica",
        ),
        pytest.param([problem(409, "it runs")], 1, "Error: it runs\n", id="one runs already"),
        pytest.param(
            [reply("running"), reply("failed", 0, reason="bytes are wrong")],
            1,
            "Error: m: bytes are wrong; 0 of 2 replicas replaced\n",
            id="a new one did not start",
        ),
        pytest.param(
            [
                reply("running"),
                reply("running", 1),
                problem(503, "away"),
                problem(503, "away"),
                reply("none", order=""),
            ],
            1,
            "1 of 2 replicas replaced\n"
            "Error: m: the order ended with its control plane, 1 of 2 replicas replaced; order it again\n",
            id="the control plane died",
        ),
        pytest.param([reply("running"), problem(404, "no m")], 1, "Error: no m\n", id="the model is deleted meanwhile"),
    ],
)
def test_restart_prints_progress_and_exit_code(answers: list[object], status: int, output: str) -> None:
    """Progress is printed, a failure is one sentence, and the exit code shows which."""
    done = CliRunner().invoke(restart_command, ["m"], obj=installation_answering(*answers))
    assert (done.exit_code, done.output) == (status, output)


def test_json_is_one_document() -> None:
    """The last response is printed, without progress."""
    installation = installation_answering(reply("running"), reply("running", 1), reply("done", 2))
    done = CliRunner().invoke(restart_command, ["m", "--json"], obj=installation)
    assert (done.exit_code, json.loads(done.output)) == (0, reply("done", 2))
