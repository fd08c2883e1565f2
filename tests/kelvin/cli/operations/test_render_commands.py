"""`kelvin models render` refuses in one sentence what it can't render."""

from types import SimpleNamespace

import httpx
import pytest
from click.testing import CliRunner, Result

from controlplane.knative.policy.knative_service import IMAGE_RULE, STORE_RULE
from kelvin.cli.operations import render_commands
from kelvin.cli.operations.render_commands import cluster_group
from kelvin.contracts.errors import InvalidRequest, Refused, RemoteFailure
from tests.kelvin.cli_targets import installation_answering

VERSION = "3f" * 32
GONE = {"error": {"message": "model 'm' does not exist", "code": "model_not_found"}}
MODEL = {"aliases": {"prod": VERSION}, "versions": [{"version": VERSION}]}


def rendered(reference: str, *answers: httpx.Response) -> Result:
    """Run the command with this reference."""
    words = [reference, "--image", "i", "--store", "s3://models"]
    return CliRunner().invoke(render_commands.render_command, words, obj=installation_answering(*answers))


def test_digits_without_a_model_are_refused() -> None:
    """The refusal is wrong usage, before any request."""
    done = rendered(VERSION)
    assert done.exit_code == 2
    assert f"Error: {VERSION}: must be M, M@prod or M@HEX\n" in done.output


def test_store_that_pods_cannot_reach_is_refused() -> None:
    """Both render commands refuse a local store before any request, and say what to use."""
    words = ["m", "--image", "i", "--store", "file:///x"]
    done = CliRunner().invoke(render_commands.render_command, words, obj=installation_answering())
    assert done.exit_code == 2
    output = " ".join(done.output.split())
    assert f"'file:///x': {STORE_RULE}" in output
    namespace = CliRunner().invoke(cluster_group, ["tenant", "acme", "--store", "file:///x"])
    assert isinstance(namespace.exception, Refused)
    assert namespace.exception.failure == InvalidRequest("store", "file:///x", STORE_RULE)


@pytest.mark.parametrize("url", ["s3://key:sesame@models/prod", "s3://models?secret=sesame", "http://key:sesame@x"])
def test_refused_store_shows_no_credentials(url: str) -> None:
    """Both render commands refuse a store's URL with credentials, and repeat none of them."""
    words = ["m", "--image", "i", "--store", url]
    done = CliRunner().invoke(render_commands.render_command, words, obj=installation_answering())
    namespace = CliRunner().invoke(cluster_group, ["tenant", "acme", "--store", url])
    assert done.exit_code == 2
    assert isinstance(namespace.exception, Refused)
    assert "sesame" not in done.output + namespace.output + str(namespace.exception)


@pytest.mark.parametrize("image", ["", "registry.example/kelvin@sha256:…", "a b"])
def test_name_that_no_image_has_is_refused(image: str) -> None:
    """An invalid image name, such as the dots of an example, is refused before any request."""
    done = CliRunner().invoke(
        render_commands.render_command, ["m", "--image", image, "--store", "s3://models"], obj=installation_answering()
    )
    assert done.exit_code == 2
    assert f"{image!r}: {IMAGE_RULE}" in " ".join(done.output.split())


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([httpx.Response(404, json=GONE)], id="it never was there"),
        pytest.param([httpx.Response(200, json=MODEL), httpx.Response(404, json=GONE)], id="deleted meanwhile"),
    ],
)
def test_a_refusal_is_raised_as_it_was_said(monkeypatch: pytest.MonkeyPatch, answers: list[httpx.Response]) -> None:
    """A refusal is passed on unchanged, from the first or the second request."""
    monkeypatch.setattr(render_commands, "ExportClient", lambda *_: SimpleNamespace(manifest=lambda _: None))
    done = rendered("m", *answers)
    assert isinstance(done.exception, Refused)
    assert done.exception.failure == RemoteFailure("model_not_found", 404, "model 'm' does not exist")
