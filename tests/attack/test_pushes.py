"""Hostile pushes: endless templates, files that expand to gigabytes, parsers that panic.

Each is refused with the name of its file and takes bounded memory. Another tenant's pushes and requests succeed.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from coldstart_bench.harness.installation import Installation, running_installation
from tests.attack.attacker import MIB, SETTINGS, Bystander, MemoryWatch, metric
from tests.e2e.https_client import all_at_once
from tests.e2e.tenants import Tenant, default_tenant, make_tenant
from tests.e2e.tiny_models import make_tiny
from tests.eventually import wait

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

GROWTH_BYTES: Final = (
    1200 * MIB
)  # of all processes: a standby that runs the checks, with its imports, and its replacement
SEAL_BYTES: Final = 3072 * MIB  # a seal may grow by 2 GiB, and is checked ten times a second
PUSH_S: Final = 60.0  # for a bystander's push of a few hundred kilobytes on busy cores
JOBS: Final = 'kelvin_replicas{process="controlplane",state="job"}'
NESTED_LOOPS: Final = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class Ground:
    """An installation with an attacker, and a victim that pushes models and sends requests."""

    up: Installation
    attacker: Tenant
    victim: Tenant


@pytest.fixture(scope="module")
def ground(scratch: Path, tiny: Path) -> Iterator[Ground]:
    """An installation whose victim has a model that answers."""
    with running_installation(scratch / "pushes", settings=SETTINGS) as up:
        found = Ground(up, make_tenant(up, "attacker", scratch), make_tenant(up, "victim", scratch))
        assert found.victim.push(tiny)["exit"] == 0
        assert found.victim.complete().status == 200
        yield found


def variant(source: Path, directory: Path, **changes: Callable[[Any], Any]) -> Path:
    """Copy a model. Keyword arguments name its JSON files (`config`, `tokenizer`, ...) and the change to each."""
    shutil.copytree(source, directory)
    for name, change in changes.items():
        path = directory / f"{name}.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return directory


def with_template(source: Path, directory: Path, template: str) -> Path:
    """Copy a model and set its chat template."""
    return variant(source, directory, tokenizer_config=lambda config: config | {"chat_template": template})


def _is_refused(answer: dict[str, Any], file: str) -> None:
    """Assert that the push was rejected (exit code 3) with the name of the file."""
    assert answer["exit"] == 3, answer
    error = answer["error"]
    assert error["code"] == "artifact_rejected", answer
    assert file in error["message"], answer


def test_endless_template_beside_another_push(ground: Ground, scratch: Path, tiny: Path) -> None:
    """Eight pushes with an endless template do not delay another tenant's push or requests.

    Each of the eight is refused by the template's file, or as too many waiting pushes of one tenant.
    """
    directories = [with_template(tiny, scratch / f"endless-{n}", NESTED_LOOPS + str(n)) for n in range(8)]
    other = make_tiny(scratch / "beside", "llama", seed=2)
    taken: list[float] = []

    def push_beside() -> dict[str, Any]:
        wait(lambda: metric(ground.up, JOBS) > 0, "a push of the attacker is judged")
        began = time.monotonic()
        answer = ground.victim.push(other, "beside")
        taken.append(time.monotonic() - began)
        return answer

    with Bystander(ground.victim.complete) as bystander:
        jobs = [lambda d=directory: ground.attacker.push(d, "endless") for directory in directories]
        beside, *refused = all_at_once(push_beside, *jobs)
    assert beside["exit"] == 0, beside
    assert taken[0] < PUSH_S
    for answer in refused:
        if answer["exit"] == 1:  # more pushes than may wait for one tenant
            assert answer["error"]["code"] == "overloaded", answer
        else:
            _is_refused(answer, "tokenizer_config.json")
    assert bystander.failures == []


TEMPLATES: Final = {
    "a wide number": "{{ '%2000000000d' % 1 }}",
    "a text repeated": "{{ 'a' * 2000000000 }}",
    "a deep expression": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_template_bomb(ground: Ground, scratch: Path, tiny: Path, template: str) -> None:
    """A template that makes gigabytes, or that is too deep to compile, is refused by its file name."""
    directory = with_template(tiny, scratch / f"template-{abs(hash(template))}", template)
    with MemoryWatch(ground.up.pid) as memory, Bystander(ground.victim.complete) as bystander:
        _is_refused(ground.attacker.push(directory), "tokenizer_config.json")
    assert memory.growth_bytes < GROWTH_BYTES
    assert bystander.failures == []


def _doubles(tokenizer: Any) -> Any:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return tokenizer | {"normalizer": {"type": "Sequence", "normalizers": [step] * 40}}


def _prepends(tokenizer: Any) -> Any:
    step = {"type": "Prepend", "prepend": "b" * 1000}
    return tokenizer | {"normalizer": {"type": "Sequence", "normalizers": [step] * 40}}


def _no_rotation(config: Any) -> Any:
    return config | {"rope_parameters": {"rope_theta": 0, "rope_type": "default"}}


FILES: Final[dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "a normalizer that doubles": ("tokenizer", _doubles),
    "a normalizer that prepends": ("tokenizer", _prepends),
    "rope_theta 0": ("config", _no_rotation),
    "deep JSON in a config": ("config", lambda config: config | {"x": json.loads("[" * 900 + "]" * 900)}),
}


@pytest.mark.parametrize(("file", "change"), FILES.values(), ids=FILES.keys())
def test_hostile_file(ground: Ground, scratch: Path, tiny: Path, file: str, change: Callable[[Any], Any]) -> None:
    """A hostile tokenizer or config is refused by its file name, with bounded memory."""
    directory = variant(tiny, scratch / f"file-{time.time_ns()}", **{file: change})
    with MemoryWatch(ground.up.pid) as memory, Bystander(ground.victim.complete) as bystander:
        _is_refused(ground.attacker.push(directory), f"{file}.json")
    assert memory.growth_bytes < GROWTH_BYTES
    assert bystander.failures == []


def _onnx(nodes: list[Any]) -> bytes:
    from onnx import TensorProto, helper

    first = helper.make_tensor_value_info("x0", TensorProto.FLOAT, [None, 2])
    last = helper.make_tensor_value_info(f"x{len(nodes)}", TensorProto.FLOAT, [None, None])
    graph = helper.make_graph(nodes, "g", [first], [last])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    raw: bytes = model.SerializeToString()
    return raw


def _concat_chain() -> bytes:
    from onnx import helper

    return _onnx([helper.make_node("Concat", [f"x{n}", f"x{n}"], [f"x{n + 1}"], axis=1) for n in range(40)])


def _varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found += bytes([number & 127 | 128])
        number >>= 7
    return found + bytes([number])


def _empty_nodes() -> bytes:
    """Return 12 MiB of ONNX nodes that are empty: two bytes each."""
    nodes = b"\x0a\x00" * (6 << 20)
    return b"\x08\x08" + b"\x3a" + _varint(len(nodes)) + nodes


# The name in the refusal and the memory limit. A graph that passes its reader is run in a job with limits.
GRAPHS: Final = {
    "a chain of Concat": (_concat_chain, "model", SEAL_BYTES),
    "empty nodes": (_empty_nodes, "model.onnx", GROWTH_BYTES),
}


@pytest.mark.parametrize(("make", "named", "limit_bytes"), GRAPHS.values(), ids=GRAPHS.keys())
def test_onnx_bomb(ground: Ground, scratch: Path, make: Callable[[], bytes], named: str, limit_bytes: int) -> None:
    """A small ONNX graph that takes gigabytes to read or run is refused by name, with bounded memory."""
    directory = scratch / f"onnx-{make.__name__}"
    directory.mkdir()
    (directory / "model.onnx").write_bytes(make())
    with MemoryWatch(ground.up.pid) as memory, Bystander(ground.victim.complete) as bystander:
        _is_refused(ground.attacker.push(directory), named)
    assert memory.growth_bytes < limit_bytes
    assert bystander.failures == []


def test_json_bomb_in_a_header(ground: Ground, scratch: Path, tiny: Path) -> None:
    """A tokenizer of 16 MiB of empty lists, half a gigabyte as objects, is refused before it is parsed."""
    directory = variant(tiny, scratch / "commas")
    (directory / "tokenizer.json").write_bytes(b'{"a":[' + b"[]," * (5 << 20) + b"[]]}")
    with MemoryWatch(ground.up.pid) as memory, Bystander(ground.victim.complete) as bystander:
        _is_refused(ground.attacker.push(directory), "tokenizer.json")
    assert memory.growth_bytes < GROWTH_BYTES
    assert bystander.failures == []


def test_panicking_regex(ground: Ground, scratch: Path, tiny: Path) -> None:
    """A text on which the tokenizer's regular expression fails is 422 with the file's name, and the replica goes on."""
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}

    def panics(tokenizer: Any) -> Any:
        return tokenizer | {
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [pattern, tokenizer["pre_tokenizer"]]}
        }

    directory = variant(tiny, scratch / "panics", tokenizer=panics)
    pushed = ground.attacker.push(directory, "panics")
    assert pushed["exit"] == 0, pushed
    with Bystander(lambda: ground.attacker.complete(model="panics")) as bystander:
        answer = ground.attacker.complete("a" * 60 + "b", model="panics")
        assert answer.status == 422, answer.raw
        error = answer.json["error"]
        assert (error["code"], error["param"]) == ("artifact_rejected", "tokenizer.json")
        bystander.wait_for(3)
    assert bystander.failures == []


def test_racing_pushes(ground: Ground, scratch: Path) -> None:
    """Four concurrent pushes of one directory give one version, and one of them created it."""
    directory = make_tiny(scratch / "race", "llama", seed=3)
    answers = all_at_once(*[lambda: ground.victim.push(directory, "race")] * 4)
    assert [answer["exit"] for answer in answers] == [0] * 4, answers
    assert len({answer["version"] for answer in answers}) == 1
    assert [answer["created"] for answer in answers].count(True) == 1


def test_push_of_a_deleted_version(ground: Ground, scratch: Path) -> None:
    """A deleted version that is pushed again is reported as restored, and answers."""
    first, second = make_tiny(scratch / "gone", "llama", seed=4), make_tiny(scratch / "stays", "llama", seed=5)
    version = ground.victim.push(first, "back")["version"]
    stays = ground.victim.push(second, "back")["version"]
    ground.victim.run("deploy", f"back@{stays[:12]}")
    ground.victim.run("versions", "delete", f"back@{version[:12]}")
    assert ground.victim.complete(model=f"back@{version[:12]}").status == 404
    again = ground.victim.push(first, "back")
    assert (again["exit"], again["version"], again["restored"]) == (0, version, True), again
    assert ground.victim.complete(model=f"back@{version[:12]}").status == 200


def test_one_message_on_which_a_template_loops(ground: Ground, scratch: Path, tiny: Path) -> None:
    """A template that loops on one message is refused for that message alone. Other chats on the replica go on."""
    template = "{% if messages[0].content == 'loop' %}" + NESTED_LOOPS + "{% endif %}{{ messages[0].content }}"
    pushed = ground.attacker.push(with_template(tiny, scratch / "loops", template), "loops")
    assert pushed["exit"] == 0, pushed

    def chat(content: str) -> Any:
        body = {"model": "loops", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        return ground.attacker.post("/v1/chat/completions", body)

    with Bystander(lambda: chat("w1")) as bystander:
        bystander.wait_for(2)
        refused = all_at_once(*[lambda: chat("loop")] * 4)
        bystander.wait_for(3)
    assert [answer.status for answer in refused] == [400] * 4, refused[0].raw
    assert "template" in refused[0].json["error"]["message"]
    assert bystander.failures == []
    assert max(bystander.seconds) < 20
    wait(lambda: ground.victim.complete().status == 200, "others are answered")
    assert default_tenant(ground.up).kelvin("status")[0] == 0


def test_highest_number(ground: Ground, scratch: Path) -> None:
    """The largest `float32` is accepted in its shortest form and returned. A larger number is 400."""
    from onnx import helper

    directory = scratch / "highest"
    directory.mkdir()
    (directory / "model.onnx").write_bytes(_onnx([helper.make_node("Identity", ["x0"], ["x1"])]))
    pushed = ground.victim.push(directory, "highest")
    assert pushed["exit"] == 0, pushed

    def infer(number: str) -> Any:
        data = json.loads(f"[[{number}, 0]]")
        body = {"inputs": [{"name": "x0", "shape": [1, 2], "datatype": "FP32", "data": data}]}
        return ground.victim.post("/v2/models/highest/infer", body)

    answer = infer("3.4028235e38")
    assert answer.status == 200, answer.raw
    assert answer.json["outputs"][0]["data"][0] == pytest.approx(3.4028235e38)
    assert infer("3.5e38").status == 400
