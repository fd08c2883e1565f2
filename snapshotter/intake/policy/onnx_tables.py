"""The messages of an ONNX model with the field numbers of `onnx.proto` (release 1.23), and the served operators.

A test compares the numbers with the library's own. Fields whose values don't matter are skipped.
"""

from typing import Final

from snapshotter.intake.policy.protobuf import Field, Table, WireType


def _singular(name: str, wire_type: WireType = WireType.LENGTH) -> Field:
    return Field(name, wire_type)


def _repeated(name: str, wire_type: WireType = WireType.LENGTH, *, max_count: int) -> Field:
    return Field(name, wire_type, is_repeated=True, max_count=max_count)


def _ignored(name: str, wire_type: WireType = WireType.LENGTH, *, is_repeated: bool = True) -> Field:
    return Field(name, wire_type, is_repeated=is_repeated, is_kept=False)


MAX_NODES: Final = 10_000
MAX_INITIALIZERS: Final = 10_000
MAX_TENSORS: Final = 256  # inputs and outputs, each
MAX_DIMENSIONS: Final = 8
_VARINT: Final = WireType.VARINT

MODEL: Final[Table] = {
    1: _singular("ir_version", _VARINT),
    2: _ignored("producer_name", is_repeated=False),
    3: _ignored("producer_version", is_repeated=False),
    4: _ignored("domain", is_repeated=False),
    5: _ignored("model_version", _VARINT, is_repeated=False),
    6: _ignored("doc_string", is_repeated=False),
    7: _singular("graph"),
    8: _repeated("opset_import", max_count=64),
    14: _ignored("metadata_props"),
    20: _ignored("training_info"),
    25: _ignored("functions"),
    26: _ignored("configuration"),
}
OPSET: Final[Table] = {1: _singular("domain"), 2: _singular("version", _VARINT)}
GRAPH: Final[Table] = {
    1: _repeated("node", max_count=MAX_NODES),
    2: _ignored("name", is_repeated=False),
    5: _repeated("initializer", max_count=MAX_INITIALIZERS),
    10: _ignored("doc_string", is_repeated=False),
    11: _repeated("input", max_count=MAX_INITIALIZERS + MAX_TENSORS),  # old models list their weights, too
    12: _repeated("output", max_count=MAX_TENSORS),
    13: _ignored("value_info"),
    14: _ignored("quantization_annotation"),
    15: _ignored("sparse_initializer"),
    16: _ignored("metadata_props"),
}
NODE: Final[Table] = {
    1: _ignored("input"),
    2: _ignored("output"),
    3: _ignored("name", is_repeated=False),
    4: _singular("op_type"),
    5: _repeated("attribute", max_count=1024),
    6: _ignored("doc_string", is_repeated=False),
    7: _singular("domain"),
    8: _ignored("overload", is_repeated=False),
    9: _ignored("metadata_props"),
    10: _ignored("device_configurations"),
}
ATTRIBUTE: Final[Table] = {
    1: _singular("name"),
    2: _ignored("f", WireType.FIXED32, is_repeated=False),
    3: _ignored("i", _VARINT, is_repeated=False),
    4: _ignored("s", is_repeated=False),
    5: _singular("t"),
    6: _ignored("g", is_repeated=False),
    7: _ignored("floats", WireType.FIXED32),
    8: _ignored("ints", _VARINT),
    9: _ignored("strings"),
    10: _repeated("tensors", max_count=1024),
    11: _ignored("graphs"),
    13: _ignored("doc_string", is_repeated=False),
    14: _ignored("tp", is_repeated=False),
    15: _ignored("type_protos"),
    20: _ignored("type", _VARINT, is_repeated=False),
    21: _ignored("ref_attr_name", is_repeated=False),
    22: _ignored("sparse_tensor", is_repeated=False),
    23: _ignored("sparse_tensors"),
}
TENSOR: Final[Table] = {
    1: _repeated("dims", _VARINT, max_count=MAX_DIMENSIONS),
    2: _singular("data_type", _VARINT),
    3: _ignored("segment", is_repeated=False),
    4: _ignored("float_data"),
    5: _ignored("int32_data"),
    6: _ignored("string_data"),
    7: _ignored("int64_data"),
    8: _singular("name"),
    9: _singular("raw_data"),
    10: _ignored("double_data"),
    11: _ignored("uint64_data"),
    12: _ignored("doc_string", is_repeated=False),
    13: _ignored("external_data"),
    14: _singular("data_location", _VARINT),
    16: _ignored("metadata_props"),
}
VALUE_INFO: Final[Table] = {
    1: _singular("name"),
    2: _singular("type"),
    3: _ignored("doc_string", is_repeated=False),
    4: _ignored("metadata_props"),
}
TYPE: Final[Table] = {
    1: _singular("tensor_type"),
    4: _ignored("sequence_type", is_repeated=False),
    5: _ignored("map_type", is_repeated=False),
    6: _ignored("denotation", is_repeated=False),
    7: _ignored("opaque_type", is_repeated=False),
    8: _ignored("sparse_tensor_type", is_repeated=False),
    9: _ignored("optional_type", is_repeated=False),
}
TENSOR_TYPE: Final[Table] = {1: _singular("elem_type", _VARINT), 2: _singular("shape")}
SHAPE: Final[Table] = {1: _repeated("dim", max_count=64)}
DIMENSION: Final[Table] = {
    1: _singular("dim_value", _VARINT),
    2: _ignored("dim_param", is_repeated=False),
    3: _ignored("denotation", is_repeated=False),
}

# By domain; "" is ONNX's own, also called "ai.onnx". Left out are operators that draw random numbers, run their own
# graphs (If, Loop, Scan), or make tensors of any size (Expand, Tile, Range), and those that no classical model uses.
OPERATORS: Final[dict[str, frozenset[str]]] = {
    "": frozenset(
        (
            "Abs", "Acos", "Acosh", "Add", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "Cast",
            "CastLike", "Ceil", "Clip", "Concat", "Constant", "Cos", "Cosh", "Div", "Elu", "Equal", "Erf", "Exp",
            "Flatten", "Floor", "Gather", "GatherElements", "Gemm", "Greater", "GreaterOrEqual", "Identity", "IsInf",
            "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "MatMul", "Max", "Mean", "Min", "Mod",
            "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax",
            "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Round", "Selu",
            "Shape", "Sigmoid", "Sign", "Sin", "Sinh", "Slice", "Softmax", "Softplus", "Softsign", "Split", "Sqrt",
            "Squeeze", "Sub", "Sum", "Tan", "Tanh", "TopK", "Transpose", "Unsqueeze", "Where", "Xor",
        )
    ),
    "ai.onnx.ml": frozenset(
        (
            "ArrayFeatureExtractor", "Binarizer", "CategoryMapper", "DictVectorizer", "FeatureVectorizer", "Imputer",
            "LabelEncoder", "LinearClassifier", "LinearRegressor", "Normalizer", "OneHotEncoder", "SVMClassifier",
            "SVMRegressor", "Scaler", "TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor",
        )
    ),
}  # fmt: skip
