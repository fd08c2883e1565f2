"""Settings have defaults that fit the machine, and refuse bad values with name, value and rule."""

from pathlib import Path

import pytest

from kelvin.contracts.setting_parser import BadSetting
from weightcache.app.settings import PeerSettings, read_settings


def test_defaults_follow_memory_and_disk(tmp_path: Path) -> None:
    """Only the data directory is required."""
    settings = read_settings({"KELVIN_DATA": str(tmp_path)})
    assert settings.store_url == (tmp_path / "store").as_uri()
    assert settings.slab_bytes == 256 << 20
    assert settings.host_bytes >= settings.slab_bytes
    assert settings.nvme_bytes > 0
    assert settings.spare_bytes == min(1 << 30, settings.host_bytes // 4)
    assert settings.lifeline_fd is None
    assert (settings.store_reads, settings.hedge_percent) == (12, 0)


def test_s3_store_has_other_defaults(tmp_path: Path) -> None:
    """An S3 store has more concurrent reads by default than a disk, and hedged reads. Both can be set."""
    env = {"KELVIN_DATA": str(tmp_path), "KELVIN_STORE": "s3://bucket/p"}
    assert (read_settings(env).store_reads, read_settings(env).hedge_percent) == (32, 5)
    chosen = read_settings({**env, "KELVIN_STORE_READS": "64", "KELVIN_HEDGE_PERCENT": "0.5"})
    assert (chosen.store_reads, chosen.hedge_percent) == (64, 0.5)


def test_own_files_count_as_free_space(tmp_path: Path) -> None:
    """A restart with a full NVMe tier has the same budget as before: the tier's own files count as free."""
    chunk = tmp_path / "cache" / "acme" / "00" / ("0" * 64)
    chunk.parent.mkdir(parents=True)
    chunk.touch()
    without = read_settings({"KELVIN_DATA": str(tmp_path)}).nvme_bytes
    with chunk.open("wb") as file:
        file.truncate(1 << 42)  # a sparse file: takes no space, but counts
    held = read_settings({"KELVIN_DATA": str(tmp_path)}).nvme_bytes - without
    assert abs(held - (1 << 42) * 8 // 10) < 1 << 36, "the tier's budget is 80 % of the disk"


def test_foreign_entries_of_the_tier_are_no_space(tmp_path: Path) -> None:
    """A dangling link among the chunks does not stop the start."""
    (tmp_path / "cache" / "acme" / "ab").mkdir(parents=True)
    (tmp_path / "cache" / "acme" / "ab" / "dangling").symlink_to(tmp_path / "nowhere")
    assert read_settings({"KELVIN_DATA": str(tmp_path)}).nvme_bytes > 0


@pytest.mark.parametrize(
    ("env", "text"),
    [
        pytest.param({}, "KELVIN_DATA=", id="no data directory"),
        pytest.param({"KELVIN_SLAB_BYTES": "1000"}, "KELVIN_SLAB_BYTES=1000", id="a slab below a huge page"),
        pytest.param({"KELVIN_SLAB_BYTES": "3000000"}, "must be a multiple of", id="a slab of odd size"),
        pytest.param({"KELVIN_HOST_BYTES": "1"}, "KELVIN_HOST_BYTES=1", id="less than a slab"),
        pytest.param({"KELVIN_SPARE_BYTES": "-1"}, "KELVIN_SPARE_BYTES=-1", id="less than no spare"),
        pytest.param({"KELVIN_NVME_BYTES": "-1"}, "KELVIN_NVME_BYTES=-1", id="a negative budget"),
        pytest.param({"KELVIN_HOST_QUOTA": "0"}, "KELVIN_HOST_QUOTA=0", id="a quota of nothing"),
        pytest.param({"KELVIN_NVME_QUOTA": "101"}, "KELVIN_NVME_QUOTA=101", id="a quota of more than all"),
        pytest.param({"KELVIN_STORE_READS": "0"}, "KELVIN_STORE_READS=0", id="no read at once"),
        pytest.param({"KELVIN_STORE_READS": "129"}, "KELVIN_STORE_READS=129", id="too many reads at once"),
        pytest.param({"KELVIN_RECHECK": "never"}, "KELVIN_RECHECK=never", id="an unknown way to recheck"),
        pytest.param({"KELVIN_HEDGE_PERCENT": "51"}, "KELVIN_HEDGE_PERCENT=51", id="more than half hedged"),
        pytest.param({"KELVIN_LIFELINE_FD": "x"}, "KELVIN_LIFELINE_FD=x", id="no number"),
    ],
)
def test_invalid_setting_is_refused(tmp_path: Path, env: dict[str, str], text: str) -> None:
    with pytest.raises(BadSetting, match=text):
        read_settings(env if text == "KELVIN_DATA=" else {"KELVIN_DATA": str(tmp_path), **env})


def key_file(root: Path) -> str:
    path = root / "peers.key"
    path.write_bytes(b"0123456789abcdef" * 2)
    path.chmod(0o600)
    return str(path)


def test_peer_settings_are_address_urls_and_secret(tmp_path: Path) -> None:
    """The peer settings are the address to listen at, the peers' URLs and the shared secret. By default there
    are none.
    """
    env = {"KELVIN_DATA": str(tmp_path), "KELVIN_PEER_KEY": key_file(tmp_path)}
    assert read_settings(env).peers == PeerSettings()
    listen = {"KELVIN_PEER_LISTEN": "[::1]:7443"}
    urls = {"KELVIN_PEERS": "https://a:7443, https://10.0.0.2:7443 https://a:7443"}
    found = read_settings(env | listen | urls).peers
    assert found == PeerSettings(("::1", 7443), ("https://a:7443", "https://10.0.0.2:7443"), (b"0123456789abcdef" * 2,))
    assert "0123" not in repr(found)
    assert read_settings(env | urls).peers.listen is None
    assert read_settings(env | {"KELVIN_PEER_LISTEN": "0.0.0.0:1"}).peers.urls == ()


@pytest.mark.parametrize(
    ("env", "text"),
    [
        pytest.param({"KELVIN_PEERS": "http://a:1"}, "KELVIN_PEERS=http://a:1: must be https", id="no TLS"),
        pytest.param({"KELVIN_PEERS": "https://a"}, "KELVIN_PEERS=", id="no port"),
        pytest.param({"KELVIN_PEERS": "https://a:1/x"}, "KELVIN_PEERS=", id="a path"),
        pytest.param({"KELVIN_PEERS": "https://u:p@a:1"}, "KELVIN_PEERS=", id="a password"),
        pytest.param({"KELVIN_PEERS": " ".join(f"https://a:{n}" for n in range(1, 300))}, "256 or fewer", id="many"),
        pytest.param({"KELVIN_PEER_LISTEN": "7443"}, "KELVIN_PEER_LISTEN=7443: must be ADDRESS:PORT", id="no address"),
        pytest.param({"KELVIN_PEER_LISTEN": "a:b"}, "KELVIN_PEER_LISTEN=", id="no port to listen at"),
        pytest.param({"KELVIN_PEER_LISTEN": "[::1:7443"}, "KELVIN_PEER_LISTEN=", id="a bracket"),
        pytest.param({"KELVIN_PEERS": "https://a:1", "KELVIN_PEER_KEY": ""}, "KELVIN_PEER_KEY=: is req", id="no key"),
        pytest.param({"KELVIN_PEERS": "https://a:1", "KELVIN_PEER_KEY": "/none"}, "can't be read", id="no such file"),
        pytest.param({"KELVIN_PEERS": "https://a:1", "KELVIN_PEER_KEY": "/dev/null"}, "every user", id="no secret"),
    ],
)
def test_bad_peer_setting_is_refused(tmp_path: Path, env: dict[str, str], text: str) -> None:
    with pytest.raises(BadSetting, match=text):
        read_settings({"KELVIN_DATA": str(tmp_path), "KELVIN_PEER_KEY": key_file(tmp_path), **env})
