"""The command `kelvin push DIR --name M`: options, output and exit codes. `push.py` does the work."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
import msgspec

from kelvin.cli.artifacts.exit_code_policy import exit_code_of
from kelvin.cli.artifacts.progress import open_progress
from kelvin.cli.artifacts.push import (
    DEFAULT_SENDERS,
    DryRunResult,
    PushResult,
    TransferOptions,
    push_directory,
    rehearse,
)
from kelvin.cli.artifacts.push_client import open_client
from kelvin.cli.artifacts.push_signing import PushSigner, make_bundle_signer, read_claims, read_key
from kelvin.cli.artifacts.push_source import TensorsOptions, is_tensors
from kelvin.cli.base.rate_policy import parse_rate
from kelvin.contracts.errors import Refused
from kelvin.contracts.problem import to_wire

SIGN_FORMATS: Final = ("kelvin", "model-signing")


class _ByteRate(click.ParamType[int]):
    name = "RATE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_rate(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command("push")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--name", "model", required=True, help="The model. Its first push creates it.")
@click.option(
    "--with", "beside", type=click.Path(path_type=Path), help="Directory with config and tokenizer of a .tensors file."
)
@click.option("--repack", is_flag=True, help="Store only a .tensors file's tensors, in packs that versions share.")
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=DEFAULT_SENDERS,
    show_default=True,
    help="Send at most this many chunks at once.",
)
@click.option("--limit-rate", "bytes_s", type=_ByteRate(), help="Send at most this many bytes a second: 500K, 10M, 1G.")
@click.option(
    "--sign",
    "signing_key",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Sign the version's origin with this private key (PEM).",
)
@click.option(
    "--claims",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML file with licence, training data, metrics, provenance.",
)
@click.option(
    "--sign-format",
    "form",
    type=click.Choice(SIGN_FORMATS),
    default=SIGN_FORMATS[0],
    show_default=True,
    help="model-signing: also sign exports in OpenSSF's format.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be sent and the version; send and keep nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, also for a refusal.")
def push_command(
    directory: Path,
    model: str,
    beside: Path | None,
    repack: bool,
    parallel: int,
    bytes_s: int | None,
    signing_key: Path | None,
    claims: Path | None,
    form: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Upload a directory as a version of a model.

    DIRECTORY is in Hugging Face layout with safetensors, or holds model.onnx, or is a .tensors file. The last line
    printed is the version. To resume an interrupted push, push again: only missing chunks are sent.

    \b
    kelvin push ./tinylm --name tinylm

    Exit codes: 0 the version exists (or would), 1 failed, retry later, 2 wrong usage, 3 the directory can't be served,
    4 no space.
    """
    options = ([] if beside is None else [f"--with {beside}"]) + (["--repack"] if repack else [])
    if options and not is_tensors(directory):
        raise click.UsageError(f"{' '.join(options)}: only for a .tensors file, which {directory} is not")
    wish = TensorsOptions(beside, repack)
    if signing_key is None and (claims is not None or form != SIGN_FORMATS[0]):
        raise click.UsageError("--claims and --sign-format: only with --sign")
    if signing_key is not None and dry_run:
        raise click.UsageError("--sign: not with --dry-run, which keeps nothing")
    line = TransferOptions(parallel, bytes_s)
    with _exit_with_code(as_json):
        signing = None if signing_key is None else _push_signer(signing_key, claims, form)
        _push(directory, model, wish, line, signing, dry_run, as_json)


def _push_signer(key: Path, claims: Path | None, form: str) -> PushSigner:
    signer = read_key(key)
    return PushSigner(signer, read_claims(claims), None if form == SIGN_FORMATS[0] else make_bundle_signer(key, signer))


def _push(
    directory: Path,
    model: str,
    wish: TensorsOptions,
    line: TransferOptions,
    signing: PushSigner | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    with open_client() as client, open_progress(not as_json) as progress:
        if dry_run:
            _print_dry_run(model, rehearse(directory, model, client, progress, line, wish), as_json)
        else:
            _print_result(push_directory(directory, model, client, progress, line, wish, signing), as_json)


@contextmanager
def _exit_with_code(as_json: bool) -> Iterator[None]:
    try:
        yield
    except Refused as refused:
        if as_json:
            click.echo(json.dumps({"error": msgspec.structs.asdict(to_wire(refused.failure))}))
        else:
            click.echo(f"Error: {refused.failure.message}", err=True)
        sys.exit(exit_code_of(refused.failure))


def _print_result(pushed: PushResult, as_json: bool) -> None:
    committed = pushed.committed
    if as_json:
        sent = {"sent_chunks": pushed.sent_chunks, "sent_bytes": pushed.sent_bytes, "ignored": pushed.ignored}
        click.echo(json.dumps({"dry_run": False, **msgspec.to_builtins(committed), **sent}))
        return
    _print_ignored(pushed.ignored)
    news = "a new version" if committed.created else "this version was there already"
    if committed.restored:
        news = "this version was deleted, and is back"
    size = (
        f"{committed.new_chunks} new chunks, {pushed.sent_bytes / 1e6:.1f} of {committed.total_bytes / 1e6:.1f} MB sent"
    )
    click.echo(f"{committed.model}: {news}; {size}")
    if committed.start_problem is not None:
        click.echo(f"the version can't start yet: {committed.start_problem}", err=True)
    click.echo(committed.version)


def _print_dry_run(model: str, rehearsed: DryRunResult, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"dry_run": True, "model": model, **msgspec.to_builtins(rehearsed)}))
        return
    _print_ignored(rehearsed.ignored)
    news = "this version is there already" if rehearsed.exists else "would be a new version"
    size = (
        f"{rehearsed.missing_chunks} chunks, {rehearsed.missing_bytes / 1e6:.1f} "
        f"of {rehearsed.total_bytes / 1e6:.1f} MB would be sent"
    )
    click.echo(f"{model}: {news}; {size}")
    click.echo(rehearsed.version)


def _print_ignored(ignored: tuple[str, ...]) -> None:
    for path in ignored:
        click.echo(f"left out: {path}", err=True)
