"""Decide whether an ONNX model may be served. Its protobuf is read strictly and judged as data; none of it is run here.

It must be one flat graph of known operators that contains all of its weights: no functions, no graph in an attribute,
no external file, no sparse tensor, no operator of another domain. Raises `Refused(ArtifactRejected)` with the reason.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final, NoReturn

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.tensor_schema import ANY_EXTENT, Datatype, TensorSpec
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy import onnx_tables as tables
from snapshotter.intake.policy.file_roles import ONNX_FILE
from snapshotter.intake.policy.onnx_tables import MAX_DIMENSIONS, MAX_INITIALIZERS, MAX_NODES, MAX_TENSORS
from snapshotter.intake.policy.protobuf import Malformed, Message, read_message, signed

MAX_NAME: Final = 256
MAX_EXTENT: Final = 1 << 20
MAX_ELEMENTS: Final = 1 << 26
IR_VERSIONS: Final = range(3, 14)
_ONNX: Final = "ai.onnx"
# TensorProto.DataType: the types of the protocol, and the bytes of an element in raw weights.
_DATATYPES: Final[Mapping[int, Datatype]] = {
    1: "FP32", 2: "UINT8", 3: "INT8", 4: "UINT16", 5: "INT16", 6: "INT32", 7: "INT64", 8: "BYTES", 9: "BOOL",
    11: "FP64", 12: "UINT32", 13: "UINT64",
}  # fmt: skip
_ELEMENT_BYTES: Final[Mapping[int, int]] = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 11: 8, 12: 4, 13: 8}
_STRING: Final = 8
_FORBIDDEN_ATTRIBUTES: Final = {
    "g": "holds a graph of its own", "graphs": "holds graphs of its own", "sparse_tensor": "is sparse",
    "sparse_tensors": "is sparse", "ref_attr_name": "belongs to a function", "tp": "holds a type",
    "type_protos": "holds types",
}  # fmt: skip
_FORBIDDEN_IN_MODEL: Final = {
    "functions": "it defines functions of its own: only the known operators are served",
    "training_info": "it holds a graph for training",
    "configuration": "it is cut for several devices",
}
_FORBIDDEN_IN_GRAPH: Final = {
    "sparse_initializer": "it has sparse weights",
    "quantization_annotation": "it is annotated for quantisation",
}
ZIPMAP_HINT: Final = "convert with the option zipmap=False"


def read_graph(raw: bytes) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs and outputs of a servable model, in the graph's order. Open dimensions are -1."""
    try:
        return _judge(memoryview(raw))
    except Malformed as error:
        reject(f"it is no ONNX model: {error}")


def reject(reason: str) -> NoReturn:
    """Raise `Refused(ArtifactRejected)` for the model file."""
    raise Refused(ArtifactRejected(ONNX_FILE, reason))


def _judge(raw: memoryview) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    model = read_message(raw, tables.MODEL, "ModelProto")
    _check_absent(model, _FORBIDDEN_IN_MODEL)
    if model.number("ir_version") not in IR_VERSIONS:
        rule = f"must be {IR_VERSIONS.start} to {IR_VERSIONS.stop - 1}"
        reject(f"its IR version is {signed(model.number('ir_version'))}: {rule}")
    _check_opsets(model)
    graph_bytes = model.part("graph")
    if graph_bytes is None:
        reject("it has no graph")
    graph = read_message(graph_bytes, tables.GRAPH, "GraphProto")
    _check_absent(graph, _FORBIDDEN_IN_GRAPH)
    _check_count(len(graph.messages("node")), 1, MAX_NODES, "nodes")
    _check_count(len(graph.messages("initializer")), 0, MAX_INITIALIZERS, "initializers")
    for node in graph.messages("node"):
        _check_node(read_message(node, tables.NODE, "NodeProto"))
    # Old models list their weights among the inputs, too.
    weights = {_check_tensor(tensor, "an initializer") for tensor in graph.messages("initializer")}
    inputs = [spec for each in graph.messages("input") if (spec := _spec(each, weights)) is not None]
    outputs = [spec for each in graph.messages("output") if (spec := _spec(each, set())) is not None]
    for specs, what in ((inputs, "inputs"), (outputs, "outputs")):
        _check_count(len(specs), 1, MAX_TENSORS, what)
        if len({spec.name for spec in specs}) != len(specs):
            reject(f"two of its {what} have the same name")
    return tuple(inputs), tuple(outputs)


def _check_absent(message: Message, forbidden: Mapping[str, str]) -> None:
    for name, reason in forbidden.items():
        if message.has(name):
            reject(reason)


def _check_count(count: int, lowest: int, highest: int, what: str) -> None:
    if not lowest <= count <= highest:
        reject(f"it has {count} {what}: {lowest} to {highest} are served")


def _check_opsets(model: Message) -> None:
    """Refuse two versions of one domain, as readers would disagree. Converters do repeat a domain's version."""
    versions: dict[str, int] = {}
    for part in model.messages("opset_import"):
        opset = read_message(part, tables.OPSET, "OperatorSetIdProto")
        domain, version = _domain(opset.text("domain")), opset.number("version")
        if domain not in tables.OPERATORS:
            reject(f"it uses operators of the domain {domain[:80]!r}: those of ONNX and ai.onnx.ml are served")
        if versions.setdefault(domain, version) != version:
            reject(f"it names two versions of the domain '{domain}'")


def _domain(text: str) -> str:
    return "" if text == _ONNX else text


def _check_node(node: Message) -> None:
    domain, operator = _domain(node.text("domain")), node.text("op_type")
    if operator not in tables.OPERATORS.get(domain, ()):
        hint = f"; {ZIPMAP_HINT}" if operator == "ZipMap" else ""
        reject(f"the operator {operator[:80]!r} of the domain {domain[:80]!r} is not served{hint}")
    for part in node.messages("attribute"):
        attribute = read_message(part, tables.ATTRIBUTE, "AttributeProto")
        for field, reason in _FORBIDDEN_ATTRIBUTES.items():
            if attribute.has(field):
                reject(f"the attribute {attribute.text('name')[:80]!r} of {operator} {reason}")
        tensors = [*attribute.messages("tensors")]
        if (single := attribute.part("t")) is not None:
            tensors.append(single)
        for tensor in tensors:
            _check_tensor(tensor, f"the attribute {attribute.text('name')[:80]!r} of {operator}")


def _check_tensor(part: memoryview, what: str) -> str:
    """Check a tensor without its values, which the library reads. Return its name."""
    tensor = read_message(part, tables.TENSOR, "TensorProto")
    if tensor.has("external_data") or tensor.number("data_location"):
        reject(f"{what} lies in another file: save the model as one file")
    if tensor.has("segment"):
        reject(f"{what} is only a part of a tensor")
    kind, dims = tensor.number("data_type"), tensor.numbers.get("dims", [])
    if kind not in _DATATYPES:
        reject(f"{what} has the element type {kind}, which is not served")
    if len(dims) > MAX_DIMENSIONS or prod(dims) > MAX_ELEMENTS:  # a negative extent appears as a huge one
        reject(f"{what} has {len(dims)} dimensions or more than {MAX_ELEMENTS} elements")
    raw = tensor.part("raw_data")
    if raw is not None and (kind == _STRING or len(raw) != prod(dims) * _ELEMENT_BYTES[kind]):
        reject(f"{what} has {len(raw)} bytes, which does not match its shape")
    return tensor.text("name")


def _spec(part: memoryview, weights: set[str]) -> TensorSpec | None:
    """Return an input or output as a tensor; None for a weight."""
    info = read_message(part, tables.VALUE_INFO, "ValueInfoProto")
    name = info.text("name")
    if name in weights:
        return None
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        reject(f"the name {name[:80]!r} of an input or output must have 1 to {MAX_NAME} printable characters")
    type_bytes = info.part("type")
    type_message = read_message(type_bytes, tables.TYPE, "TypeProto") if type_bytes is not None else None
    tensor_type = None if type_message is None else type_message.part("tensor_type")
    if type_message is None or tensor_type is None or len(type_message.counts) > 1 + type_message.has("denotation"):
        reject(f"'{name}' is no tensor; where it is a map of probabilities, {ZIPMAP_HINT}")
    tensor = read_message(tensor_type, tables.TENSOR_TYPE, "TypeProto.Tensor")
    kind = tensor.number("elem_type")
    if kind not in _DATATYPES:
        reject(f"'{name}' has the element type {kind}, which the protocol does not know")
    shape = tensor.part("shape")
    if shape is None:
        reject(f"'{name}' has no shape")
    return TensorSpec(name, _DATATYPES[kind], _shape(name, read_message(shape, tables.SHAPE, "TensorShapeProto")))


def _shape(name: str, message: Message) -> tuple[int, ...]:
    extents: Sequence[int] = [_extent(name, dim) for dim in message.messages("dim")]
    if not 1 <= len(extents) <= MAX_DIMENSIONS:
        reject(f"'{name}' has {len(extents)} dimensions: 1 to {MAX_DIMENSIONS} are served")
    if extents[0] != ANY_EXTENT:
        reject(f"the first dimension of '{name}' is {extents[0]}: it must be open, as it is the rows of a batch")
    return tuple(extents)


def _extent(name: str, part: memoryview) -> int:
    dim = read_message(part, tables.DIMENSION, "Dimension")
    if not dim.has("dim_value"):
        return ANY_EXTENT
    value = signed(dim.number("dim_value"))
    if value == ANY_EXTENT or (
        value == 0 and not dim.has("dim_param")
    ):  # converters say both for what they do not know
        return ANY_EXTENT
    if dim.has("dim_param") or not 1 <= value <= MAX_EXTENT:
        reject(f"a dimension of '{name}' is {value}: it must be open, or 1 to {MAX_EXTENT}")
    return value
