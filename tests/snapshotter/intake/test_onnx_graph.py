"""An ONNX graph is parsed strictly, and each refusal names the reason."""

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.tensor_schema import TensorSpec
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy import onnx_tables
from snapshotter.intake.policy.onnx_graph import read_graph
from snapshotter.intake.policy.protobuf import WireType
from tests.runtime.predictor import models
from tests.runtime.predictor.models import FLOAT, INT64, graph, tensor

X, Y = tensor("x", FLOAT, None, 2), tensor("y", FLOAT, None, 2)


def identity(x: Any = X, y: Any = Y, **more: Any) -> Any:
    return graph([helper.make_node("Identity", ["x"], ["y"])], [x], [y], **more)


def changed(change: Callable[[Any], object]) -> bytes:
    """Return a valid graph with one change."""
    model = identity(weights={"w": np.zeros((2, 2), np.float32)})
    change(model)
    raw: bytes = model.SerializeToString()
    return raw


def with_attribute(change: Callable[[Any], object]) -> Callable[[Any], None]:
    def of(model: Any) -> None:
        attribute = model.graph.node[0].attribute.add()
        attribute.name = "a"
        change(attribute)

    return of


def external(model: Any) -> None:
    weight = model.graph.initializer[0]
    weight.data_location = onnx.TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", "../../etc/passwd"


def operator(name: str, domain: str = "") -> Callable[[Any], None]:
    def of(model: Any) -> None:
        model.graph.node[0].op_type, model.graph.node[0].domain = name, domain

    return of


def sequence(model: Any) -> None:
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, [None]))
    model.graph.output[0].type.CopyFrom(kind)


def many(model: Any) -> None:
    for number in range(onnx_tables.MAX_NODES):
        model.graph.node.append(helper.make_node("Identity", ["x"], [f"n{number}"]))


REFUSALS = [
    pytest.param(lambda m: m.functions.add(), "functions of its own", id="code"),
    pytest.param(lambda m: m.training_info.add(), "training", id="a training graph"),
    pytest.param(lambda m: m.opset_import.add(domain="com.microsoft", version=1), "com.microsoft", id="a domain"),
    pytest.param(lambda m: m.opset_import.add(domain="ai.onnx", version=9), "two versions", id="the default twice"),
    pytest.param(operator("MyOp"), "'MyOp'", id="an unknown operator"),
    pytest.param(operator("Identity", "evil"), "'evil'", id="a known operator of another domain"),
    pytest.param(operator("Loop"), "'Loop'", id="a loop"),
    pytest.param(operator("RandomNormal"), "'RandomNormal'", id="a random operator"),
    pytest.param(operator("ZipMap", "ai.onnx.ml"), "zipmap=False", id="maps of probabilities"),
    pytest.param(with_attribute(lambda a: a.g.node.add()), "a graph of its own", id="a subgraph"),
    pytest.param(with_attribute(lambda a: a.graphs.add()), "graphs of its own", id="subgraphs"),
    pytest.param(with_attribute(lambda a: a.sparse_tensor.dims.append(1)), "sparse", id="a sparse attribute"),
    pytest.param(with_attribute(lambda a: setattr(a, "ref_attr_name", "b")), "function", id="a function's attribute"),
    pytest.param(with_attribute(lambda a: setattr(a.t, "data_location", 1)), "another file", id="an attribute outside"),
    pytest.param(external, "another file", id="weights outside the directory"),
    pytest.param(lambda m: m.graph.sparse_initializer.add(), "sparse weights", id="sparse weights"),
    pytest.param(lambda m: m.graph.quantization_annotation.add(), "quantisation", id="an annotation"),
    pytest.param(lambda m: setattr(m.graph.initializer[0], "raw_data", b"123"), "3 bytes", id="short weights"),
    pytest.param(lambda m: m.graph.initializer[0].dims.append(-1), "elements", id="a negative extent"),
    pytest.param(lambda m: m.graph.initializer[0].dims.append(1 << 40), "elements", id="absurd weights"),
    pytest.param(lambda m: setattr(m.graph.initializer[0], "data_type", 14), "element type 14", id="complex weights"),
    pytest.param(lambda m: m.graph.initializer[0].segment.SetInParent(), "part of a tensor", id="a segment"),
    pytest.param(many, "GraphProto.node occurs more than 10000 times", id="too many nodes"),
    pytest.param(lambda m: m.graph.ClearField("node"), "0 nodes", id="no node"),
    pytest.param(lambda m: m.ClearField("graph"), "no graph", id="no graph"),
    pytest.param(lambda m: m.graph.ClearField("input"), "0 inputs", id="no input"),
    pytest.param(lambda m: m.graph.ClearField("output"), "0 outputs", id="no output"),
    pytest.param(lambda m: m.graph.input.append(X), "the same name", id="an input twice"),
    pytest.param(lambda m: setattr(m, "ir_version", 99), "IR version is 99", id="a version of the future"),
    pytest.param(lambda m: setattr(m.graph.input[0], "name", "a\nb"), "printable", id="a name of two lines"),
    pytest.param(lambda m: setattr(m.graph.input[0], "name", ""), "printable", id="no name"),
    pytest.param(sequence, "is no tensor", id="a sequence"),
    pytest.param(lambda m: m.graph.input[0].type.tensor_type.ClearField("shape"), "no shape", id="no shape"),
    pytest.param(lambda m: m.graph.input[0].CopyFrom(tensor("x", FLOAT, 1, 2)), "it must be open", id="fixed rows"),
    pytest.param(lambda m: m.graph.input[0].CopyFrom(tensor("x", FLOAT)), "0 dimensions", id="a scalar"),
    pytest.param(lambda m: m.graph.input[0].CopyFrom(tensor("x", FLOAT, None, 1 << 30)), "a dimension", id="too wide"),
    pytest.param(lambda m: m.graph.input[0].CopyFrom(tensor("x", 10, None, 2)), "element type 10", id="half floats"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSALS)
def test_unservable_graph_is_refused(change: Callable[[Any], object], reason: str) -> None:
    """The refusal names the file and the reason."""
    with pytest.raises(Refused) as caught:
        read_graph(changed(change))
    failure = caught.value.failure
    assert isinstance(failure, ArtifactRejected)
    assert failure.path == "model.onnx"
    assert reason in failure.reason


def test_servable_graph_is_admitted() -> None:
    """The graph on which every refusal above is based is accepted. Otherwise the table would prove nothing."""
    assert read_graph(changed(lambda model: None)) == (
        (TensorSpec("x", "FP32", (-1, 2)),),
        (TensorSpec("y", "FP32", (-1, 2)),),
    )
    inputs, outputs = read_graph(models.classifier().SerializeToString())
    assert [spec.datatype for spec in (*inputs, *outputs)] == ["FP32", "BYTES", "FP32"]


def test_domain_may_be_named_twice() -> None:
    """skl2onnx names a domain twice, with the same version."""
    model = identity()
    model.opset_import.add(domain="", version=17)
    assert read_graph(model.SerializeToString())


def test_weights_listed_as_inputs_are_no_inputs() -> None:
    """Models of old versions list weights among their inputs."""
    model = identity(weights={"w": np.zeros(2, np.float32)})
    model.graph.input.append(tensor("w", FLOAT, 2))
    assert [spec.name for spec in read_graph(model.SerializeToString())[0]] == ["x"]


@pytest.mark.parametrize("value", [0, -1])
def test_unknown_extents_are_open(value: int) -> None:
    """Converters write 0 and -1 for unknown extents."""
    model = identity()
    model.graph.output[0].CopyFrom(tensor("y", INT64, value, 3))
    assert read_graph(model.SerializeToString())[1] == (TensorSpec("y", "INT64", (-1, 3)),)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        pytest.param(b"", "IR version", id="nothing"),
        pytest.param(b"\x80", "does not end", id="half a number"),
        pytest.param(b"\x08" + b"\xff" * 10 + b"\x01", "more than 64 bits", id="a number without an end"),
        pytest.param(b"\x08\x08\x08\x08", "occurs twice", id="a singular field twice"),
        pytest.param(b"\x0d\x00\x00\x00\x00", "another type", id="another wire type"),
        pytest.param(b"\xfa\x3f\x00", "is unknown", id="an unknown field"),
        pytest.param(b"\x3a\x05ab", "ends after", id="a message that is cut"),
        pytest.param(b"\x0b\x0c", "another type", id="a group"),
        pytest.param(b"\x08\x08\x3a\x04\x0a\x02\x22\x00", "operator ''", id="an empty node"),
        pytest.param(b"\x08\x08\x42\x03\x0a\x01\xff", "not UTF-8", id="a text that is none"),
    ],
)
def test_refuses_bytes(raw: bytes, reason: str) -> None:
    """Bytes that protobuf's own readers merge, skip or guess at are refused."""
    with pytest.raises(Refused) as caught:
        read_graph(raw)
    assert reason in caught.value.failure.message


@given(st.data())
@settings(max_examples=60)
def test_damaged_graph_is_read_or_refused(data: st.DataObject) -> None:
    """Flipped, cut or repeated bytes of a real model are read or refused, and raise nothing else."""
    raw = bytearray(models.classifier().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "repeat"])):
            case "flip":
                raw[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del raw[at : at + data.draw(st.integers(1, 9))]
            case "repeat":
                raw[at:at] = raw[at : at + data.draw(st.integers(1, 40))]
        if not raw:
            return
    with suppress(Refused):
        read_graph(bytes(raw))


_FORMS = {
    1: WireType.FIXED64,
    2: WireType.FIXED32,
    3: WireType.VARINT,
    4: WireType.VARINT,
    5: WireType.VARINT,
    13: WireType.VARINT,
    14: WireType.VARINT,
}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (onnx_tables.MODEL, onnx.ModelProto),
        (onnx_tables.OPSET, onnx.OperatorSetIdProto),
        (onnx_tables.GRAPH, onnx.GraphProto),
        (onnx_tables.NODE, onnx.NodeProto),
        (onnx_tables.ATTRIBUTE, onnx.AttributeProto),
        (onnx_tables.TENSOR, onnx.TensorProto),
        (onnx_tables.VALUE_INFO, onnx.ValueInfoProto),
        (onnx_tables.TYPE, onnx.TypeProto),
        (onnx_tables.TENSOR_TYPE, onnx.TypeProto.Tensor),
        (onnx_tables.SHAPE, onnx.TensorShapeProto),
        (onnx_tables.DIMENSION, onnx.TensorShapeProto.Dimension),
    ],
    ids=lambda each: each.DESCRIPTOR.name if hasattr(each, "DESCRIPTOR") else "",
)
def test_tables_equal_the_librarys(table: Any, message: Any) -> None:
    """The tables have the numbers, names, types and repetition of all fields in the library."""
    found = {field.number: (field.name, _form(field), field.is_repeated) for field in message.DESCRIPTOR.fields}
    assert {number: (each.name, each.wire_type, each.is_repeated) for number, each in table.items()} == found


def _form(field: Any) -> WireType:
    """Return the wire type of a field. Packed numbers have a length."""
    return WireType.LENGTH if field.is_packed else _FORMS.get(field.type, WireType.LENGTH)


def test_operators_are_known_to_onnx() -> None:
    """Each operator is one of the library's, in its domain."""
    for domain, names in onnx_tables.OPERATORS.items():
        known = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == domain}
        assert names <= known


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        pytest.param(b"\x0a\x00", "GraphProto.node occurs more than 10000 times", id="nodes, which are kept"),
        pytest.param(b"\x6a\x00", "GraphProto.value_info occurs more than", id="notes, which are read over"),
    ],
)
def test_empty_messages_are_counted_before_they_are_kept(field: bytes, reason: str) -> None:
    """Each two bytes of such a file would take a hundred bytes of memory."""
    content = field * (6 << 20)
    length = b"".join(bytes([len(content) >> shift & 127 | (128 if shift < 21 else 0)]) for shift in (0, 7, 14, 21))
    raw = b"\x08\x08\x42\x02\x10\x0d\x3a" + length + content
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match=reason):
            read_graph(raw)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
