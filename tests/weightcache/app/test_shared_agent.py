"""An agent that several pods share refuses processes that it can't tell apart, and other tenants' versions."""

import os
from dataclasses import replace
from pathlib import Path
from types import NoneType

import pytest

from kelvin.contracts.errors import Refused
from kelvin.contracts.setting_parser import BadSetting
from tests.weightcache.kit import make_version, run_agent, settings_of
from weightcache.app import lease_server
from weightcache.app.settings import read_settings

VERSION = make_version(seed=1, pages=(40, 20), chunk_pages=8)


def test_a_process_of_another_pid_namespace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has no pid here for a process of another PID namespace. Such processes can't be told apart and their
    ends can't be seen, so the end of one would free the slabs of all. The control: with a pid it is served.
    """
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        agent.acquire(VERSION).close()
        monkeypatch.setattr(lease_server, "credentials", lambda _: (0, os.geteuid()))
        with pytest.raises(Refused, match="pid=0: must be of a process that the weight cache's PID namespace has"):
            agent.acquire(VERSION)
        assert agent.state().strangers == 1


def test_an_agent_of_one_tenant_lends_nothing_of_others(tmp_path: Path) -> None:
    """Such an agent serves and reports only its tenant's versions. The control: without a tenant it serves all."""
    settings = settings_of(tmp_path)
    for tenant in ("acme", None):
        with run_agent(replace(settings, tenant=tenant)) as agent:
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
    """Any other value stops the start."""
    settings = {"KELVIN_DATA": str(tmp_path), "KELVIN_CACHE_TENANT": "acme"}
    assert read_settings(settings).tenant == "acme"
    with pytest.raises(BadSetting, match="KELVIN_CACHE_TENANT=No_Label: must be a DNS label"):
        read_settings(settings | {"KELVIN_CACHE_TENANT": "No_Label"})
