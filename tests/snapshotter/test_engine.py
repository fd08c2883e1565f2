"""A snapshotter with an engine of its own asks that to judge, and the control plane for everything else."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from contracts.jobs import ENGINE
from service.unix import SocketDirectory
from tests.snapshotter.control import FakeControlPlane
from tests.snapshotter.house import TENANT, open_house, serving, settings_for
from tests.snapshotter.models import Model
from tests.snapshotter.test_routes import planned, post, problem, push_whole


def test_who_is_asked(tmp_path: Path) -> None:
    """None is there, a dead one has left its socket, one is there, and another one in its place: the push is repeated
    until it is judged, and the control plane is asked for no job.
    """
    run = tmp_path / "engine" / "run"
    settings = replace(settings_for(tmp_path / "data"), engine=run)
    with open_house(settings) as house, house.client(TENANT) as client:
        away = (503, "unavailable", "the engine is not available")
        assert problem(post(client, "/plans", Model().request())) == away
        with closing(SocketDirectory(run)) as directory:
            directory.listen(ENGINE).close()
            assert problem(post(client, "/plans", Model().request())) == away
            one, other = FakeControlPlane(house.store), FakeControlPlane(house.store)
            with serving(one.app(), directory, ENGINE):
                plan = planned(client)
            with serving(other.app(), directory, ENGINE):
                made = push_whole(client, plan)
    assert [len(each.gates) for each in (one, other, house.control)] == [1, 0, 0]
    assert [len(each.seals) for each in (one, other, house.control)] == [0, 1, 0]
    assert [each.version for each in house.control.registrations] == [made["version"]]
