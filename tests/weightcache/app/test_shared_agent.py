"""What an agent for several pods refuses: who can't be told from others, and whoever is not of its tenant."""

import os
from dataclasses import replace
from pathlib import Path
from types import NoneType

import pytest

from kelvin.contracts.errors import Refused
from kelvin.contracts.setting_parser import BadSetting
from tests.weightcache.kit import make_version, running, settings_of
from weightcache.app import lease_server
from weightcache.app.settings import read_settings

VERSION = make_version(seed=1, pages=(40, 20), chunk_pages=8)


def test_a_process_of_another_pid_namespace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has no number for it here: it could not be told from others of its kind, nor its end be seen. One of
    them would have the memory of all taken from under them. The control: with a number it is served.
    """
    with running(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        agent.acquire(VERSION).close()
        monkeypatch.setattr(lease_server, "credentials", lambda _: (0, os.geteuid()))
        with pytest.raises(Refused, match="pid=0: must be of a process that the weight cache's PID namespace has"):
            agent.acquire(VERSION)
        assert agent.state().strangers == 1


def test_an_agent_of_one_tenant_lends_nothing_of_others(tmp_path: Path) -> None:
    """Nor does it bring it, or say where it is. The control: an agent of everybody's does all of it."""
    settings = settings_of(tmp_path)
    for tenant in ("acme", None):
        with running(replace(settings, tenant=tenant)) as agent:
            agent.publish(VERSION)
            agent.publish(VERSION, "other")
            agent.acquire(VERSION).close()
            if tenant is None:
                agent.acquire(VERSION, tenant="other").close()
                continue
            with pytest.raises(Refused, match="does not exist"):
                agent.acquire(VERSION, tenant="other")
            for method, path, body in (
                ("GET", f"/v1/whereabouts?tenant=other&version={VERSION.id}", None),
                ("POST", "/v1/prefetch", {"tenant": "other", "version": VERSION.id}),
            ):
                with pytest.raises(Refused, match="does not exist"):
                    agent.ask(method, path, NoneType, body)


def test_a_tenant_is_a_name(tmp_path: Path) -> None:
    """Or the agent doesn't start."""
    settings = {"KELVIN_DATA": str(tmp_path), "KELVIN_CACHE_TENANT": "acme"}
    assert read_settings(settings).tenant == "acme"
    with pytest.raises(BadSetting, match="KELVIN_CACHE_TENANT=No_Label: must be a DNS label"):
        read_settings(settings | {"KELVIN_CACHE_TENANT": "No_Label"})
