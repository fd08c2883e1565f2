"""Parsing of S3 store URLs. A refusal never repeats a secret."""

import pytest

from kelvin.blobstore.s3_location import S3Location, parse_s3_url
from kelvin.contracts.setting_parser import BadSetting


@pytest.mark.parametrize(
    ("url", "place"),
    [
        pytest.param("s3://bucket", S3Location("bucket"), id="a bucket"),
        pytest.param("s3://bucket/", S3Location("bucket"), id="a slash"),
        pytest.param("s3://my.bucket-1/a/b", S3Location("my.bucket-1", "a/b/"), id="a prefix"),
        pytest.param("s3://bucket/a/b/", S3Location("bucket", "a/b/"), id="the same with a slash"),
        pytest.param(
            "s3://bucket/a?endpoint=http://minio:9000",
            S3Location("bucket", "a/", "http://minio:9000", path_style=True),
            id="an endpoint implies path style",
        ),
        pytest.param(
            "s3://bucket?endpoint=https://s3.example.com&path_style=false",
            S3Location("bucket", endpoint="https://s3.example.com"),
            id="path style can be turned off",
        ),
        pytest.param("s3://bucket?path_style=true", S3Location("bucket", path_style=True), id="Amazon by path"),
        pytest.param(
            "s3://bucket?region=eu-central-1&connect_s=1.5&read_s=20&connections=32",
            S3Location("bucket", region="eu-central-1", connect_s=1.5, read_s=20.0, connections=32),
            id="all other parameters",
        ),
    ],
)
def test_places(url: str, place: S3Location) -> None:
    assert parse_s3_url(url) == place


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        pytest.param("s3://", "must be s3://BUCKET/PREFIX", id="no bucket"),
        pytest.param("s3://Bucket", "must be s3://BUCKET/PREFIX", id="a capital"),
        pytest.param("s3://ab", "must be s3://BUCKET/PREFIX", id="too short"),
        pytest.param("s3://bucket:9000", "must be s3://BUCKET/PREFIX", id="a port"),
        pytest.param("s3://bucket/a#b", "must be s3://BUCKET/PREFIX", id="a fragment"),
        pytest.param("s3://bucket/a//b", "each segment", id="an empty segment"),
        pytest.param("s3://bucket/../b", "each segment", id="the parent"),
        pytest.param(f"s3://bucket/{'a' * 121}", "at most 120 characters", id="a long prefix"),
        pytest.param("s3://bucket?endpoint=minio:9000", "its endpoint must be", id="an endpoint without scheme"),
        pytest.param("s3://bucket?endpoint=http://minio/path", "its endpoint must be", id="an endpoint with a path"),
        pytest.param("s3://bucket?endpoint=http://minio:nine", "its endpoint must be", id="a port that is no number"),
        pytest.param("s3://bucket?region=EU", "its region must be", id="an invalid region"),
        pytest.param("s3://bucket?path_style=yes", "path_style=yes: must be true or false", id="an invalid flag"),
        pytest.param("s3://bucket?read_s=0", "read_s=0: must be 0.05 or more", id="a timeout of zero"),
        pytest.param("s3://bucket?connections=many", "connections=many: must be a whole number", id="a bad number"),
        pytest.param("s3://bucket?read_s=1&read_s=2", "once, and nothing else", id="a parameter given twice"),
    ],
)
def test_refused(url: str, reason: str) -> None:
    """A refusal is one line with the setting and the rule."""
    with pytest.raises(BadSetting) as bad:
        parse_s3_url(url)
    assert str(bad.value).startswith("KELVIN_STORE=s3://")
    assert reason in str(bad.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:sesame@bucket/a",
        "s3://sesame@bucket",
        "s3://bucket?aws_secret_access_key=sesame",
        "s3://bucket?endpoint=https://user:sesame@minio",
        "s3://bucket?region=sesame+",
    ],
)
def test_no_secret_is_repeated(url: str) -> None:
    """A refusal doesn't repeat a secret that was put into the URL."""
    with pytest.raises(BadSetting) as bad:
        parse_s3_url(url)
    assert "sesame" not in str(bad.value)
