"""Startup with a store in S3: errors and warnings. Processes with other stores don't import boto3."""

import asyncio
import logging
import subprocess
import sys
from dataclasses import replace

import pytest

from kelvin.blobstore.blob_store import BlobStore, BlobUnavailable
from kelvin.blobstore.store_factory import open_checked_store, open_store
from kelvin.contracts.setting_parser import BadSetting
from tests.eventually import eventually, wait
from tests.faults.http_faults import SLOW_DOWN, ClosedConnection, Exchange, Fault, S3Error
from tests.kelvin.blobstore.s3_world import BODY, World
from tests.kelvin.blobstore.suite import keys_of


def start(url: str, *, writes: bool = True) -> None:
    """Open and close a checked store, as a process does."""

    async def open_and_close() -> None:
        async with open_checked_store(url, writes=writes):
            pass

    asyncio.run(open_and_close())


def _overwriting(exchange: Exchange) -> None:
    rest = {name: value for name, value in exchange.request.headers.items() if name != "if-none-match"}
    exchange.send(exchange.ask(replace(exchange.request, headers=rest)))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("fault", "method", "reason"),
    [
        pytest.param(S3Error(404, "NoSuchBucket"), "GET", "the bucket does not exist", id="no bucket"),
        pytest.param(S3Error(403, "AccessDenied"), "GET", "may not do this with the bucket", id="no right to list"),
        pytest.param(S3Error(403, "AccessDenied"), "PUT", "may not do this with the bucket", id="no right to put"),
        pytest.param(S3Error(403, "InvalidAccessKeyId"), "GET", "the access key is unknown", id="an unknown key"),
        pytest.param(S3Error(403, "SignatureDoesNotMatch"), "GET", "the secret key is wrong", id="a wrong secret"),
        pytest.param(S3Error(400, "AuthorizationHeaderMalformed"), "GET", "region", id="another region"),
        pytest.param(S3Error(501, "NotImplemented"), "PUT", "lacks conditional puts", id="no conditions"),
        pytest.param(_overwriting, "PUT", "overwrites objects", id="conditions that are ignored"),
    ],
)
def test_unusable_store_is_named_at_once(world: World, fault: Fault, method: str, reason: str) -> None:
    """The refusal is one line with setting, location and reason, after three requests at most."""
    with world.proxy.faulty(fault, method=method), pytest.raises(BadSetting) as bad:
        start(world.url())
    assert str(bad.value).startswith(f"KELVIN_STORE=s3://{world.bucket}/p/ at {world.proxy.url}: ")
    assert reason in str(bad.value)
    assert len(world.proxy.seen) <= 3


def test_no_credentials(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start without any credentials is refused without a request."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(BadSetting, match="no credentials: set AWS_ACCESS_KEY_ID"):
        start(world.url())
    assert world.proxy.seen == []


def test_no_such_profile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names the unknown profile."""
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(BadSetting, match="nobody"):
        start(world.url())


@pytest.mark.parametrize("fault", [ClosedConnection(), SLOW_DOWN], ids=["closed", "slow down"])
async def test_store_that_is_away_is_retried(world: World, fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    """An unreachable store is opened with a warning and works once it is reachable."""
    world.proxy.inject(fault, times=None)
    async with open_checked_store(world.url(), writes=False) as store:
        with pytest.raises(BlobUnavailable):
            await store.read("t/a")
        world.proxy.lift()
        assert await store.put_if_absent("t/a", BODY)
    assert "the store does not answer yet" in caplog.text


def test_probe_object_is_not_listed(world: World) -> None:
    """A writer's start creates the probe object once, and no listing shows it. A reader's start puts nothing."""
    start(world.url(), writes=False)
    assert world.proxy.count("PUT") == 0
    start(world.url())
    start(world.url())
    assert world.proxy.count("PUT") == 3  # the first start puts twice, the second once

    async def keys() -> list[str]:
        async with open_checked_store(world.url(), writes=False) as store:
            return await keys_of(store)

    assert asyncio.run(keys()) == []


async def test_a_writer_clears_leftovers(world: World) -> None:
    """A writer's start aborts old uploads in the background. A reader's start keeps them."""
    world.begin_upload("t/a")
    async with open_checked_store(world.url(), writes=False):
        assert world.uploads() == ["p/t/a"]
    async with open_checked_store(world.url(), writes=True):
        await asyncio.to_thread(wait, lambda: world.uploads() == [], "no upload is left")


async def test_full_store_keeps_leftovers_and_its_writers(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """If a full disk refuses to abort uploads, the failure is logged and the store stays usable."""
    world.begin_upload("t/a")

    world.proxy.inject(S3Error(507, "XMinioStorageFull"), method="DELETE")
    async with open_checked_store(world.url(), writes=True) as store:
        await eventually(lambda: "leftovers of uploads could not be aborted" in caplog.text)
        assert await keys_of(store) == []


def test_no_secret_is_logged(world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No secret is logged, even with all loggers at DEBUG."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-indeed")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "tell-nobody-of-this")
    with caplog.at_level(logging.DEBUG):
        start(world.url())
    assert world.proxy.seen[0].request.headers["x-amz-security-token"] == "tell-nobody-of-this"
    assert "very-secret-indeed" not in caplog.text
    assert "tell-nobody-of-this" not in caplog.text


def _python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.deep
def test_processes_with_files_do_not_import_boto3() -> None:
    """The services and the CLI import boto3 only for an S3 URL, which is the control."""
    imports = (
        "import sys, weightcache.app.app, snapshotter.app.app, kelvin.cli.main, kelvin.blobstore.store_factory as f\n"
    )
    assert _python(imports + "f.open_store('memory:'); print('boto3' in sys.modules)") == "False\n"
    assert _python(imports + "f.open_store('s3://bucket'); print('boto3' in sys.modules)") == "True\n"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without boto3, the refusal says what to install."""
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "kelvin.blobstore.s3_store", raising=False)
    monkeypatch.delitem(sys.modules, "kelvin.blobstore.s3_client", raising=False)
    with pytest.raises(BadSetting, match=r"KELVIN_STORE=s3://bucket/: S3 needs boto3: .*kelvin-serving\[s3\]"):
        open_store("s3://bucket")


def test_open_store_makes_no_request(world: World) -> None:
    """`open_store` makes no request and adds retries."""
    store: BlobStore = open_store(world.url())
    assert world.proxy.seen == []
    assert "RetryingStore" in repr(store)
    assert f"s3://{world.bucket}/p/" in repr(store)
