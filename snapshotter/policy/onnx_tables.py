"""The messages of an ONNX model, field by field, as `onnx.proto` (release 1.23) numbers them, and the operators that
are served. A test holds the numbers against the library's own.

Fields of which the value does not matter here are read over, not kept.
"""

from typing import Final

from snapshotter.policy.protobuf import Field, Form, Table


def _one(name: str, form: Form = Form.LENGTH) -> Field:
    return Field(name, form)


def _many(name: str, form: Form = Form.LENGTH, *, most: int) -> Field:
    return Field(name, form, is_repeated=True, most=most)


def _over(name: str, form: Form = Form.LENGTH, *, is_repeated: bool = True) -> Field:
    return Field(name, form, is_repeated=is_repeated, is_kept=False)


MAX_NODES: Final = 10_000
MAX_INITIALIZERS: Final = 10_000
MAX_TENSORS: Final = 256  # inputs and outputs, each
MAX_DIMENSIONS: Final = 8
_VARINT: Final = Form.VARINT

MODEL: Final[Table] = {
    1: _one("ir_version", _VARINT),
    2: _over("producer_name", is_repeated=False),
    3: _over("producer_version", is_repeated=False),
    4: _over("domain", is_repeated=False),
    5: _over("model_version", _VARINT, is_repeated=False),
    6: _over("doc_string", is_repeated=False),
    7: _one("graph"),
    8: _many("opset_import", most=64),
    14: _over("metadata_props"),
    20: _over("training_info"),
    25: _over("functions"),
    26: _over("configuration"),
}
OPSET: Final[Table] = {1: _one("domain"), 2: _one("version", _VARINT)}
GRAPH: Final[Table] = {
    1: _many("node", most=MAX_NODES),
    2: _over("name", is_repeated=False),
    5: _many("initializer", most=MAX_INITIALIZERS),
    10: _over("doc_string", is_repeated=False),
    11: _many("input", most=MAX_INITIALIZERS + MAX_TENSORS),  # old models list their weights, too
    12: _many("output", most=MAX_TENSORS),
    13: _over("value_info"),
    14: _over("quantization_annotation"),
    15: _over("sparse_initializer"),
    16: _over("metadata_props"),
}
NODE: Final[Table] = {
    1: _over("input"),
    2: _over("output"),
    3: _over("name", is_repeated=False),
    4: _one("op_type"),
    5: _many("attribute", most=1024),
    6: _over("doc_string", is_repeated=False),
    7: _one("domain"),
    8: _over("overload", is_repeated=False),
    9: _over("metadata_props"),
    10: _over("device_configurations"),
}
ATTRIBUTE: Final[Table] = {
    1: _one("name"),
    2: _over("f", Form.FIXED32, is_repeated=False),
    3: _over("i", _VARINT, is_repeated=False),
    4: _over("s", is_repeated=False),
    5: _one("t"),
    6: _over("g", is_repeated=False),
    7: _over("floats", Form.FIXED32),
    8: _over("ints", _VARINT),
    9: _over("strings"),
    10: _many("tensors", most=1024),
    11: _over("graphs"),
    13: _over("doc_string", is_repeated=False),
    14: _over("tp", is_repeated=False),
    15: _over("type_protos"),
    20: _over("type", _VARINT, is_repeated=False),
    21: _over("ref_attr_name", is_repeated=False),
    22: _over("sparse_tensor", is_repeated=False),
    23: _over("sparse_tensors"),
}
TENSOR: Final[Table] = {
    1: _many("dims", _VARINT, most=MAX_DIMENSIONS),
    2: _one("data_type", _VARINT),
    3: _over("segment", is_repeated=False),
    4: _over("float_data"),
    5: _over("int32_data"),
    6: _over("string_data"),
    7: _over("int64_data"),
    8: _one("name"),
    9: _one("raw_data"),
    10: _over("double_data"),
    11: _over("uint64_data"),
    12: _over("doc_string", is_repeated=False),
    13: _over("external_data"),
    14: _one("data_location", _VARINT),
    16: _over("metadata_props"),
}
VALUE_INFO: Final[Table] = {
    1: _one("name"),
    2: _one("type"),
    3: _over("doc_string", is_repeated=False),
    4: _over("metadata_props"),
}
TYPE: Final[Table] = {
    1: _one("tensor_type"),
    4: _over("sequence_type", is_repeated=False),
    5: _over("map_type", is_repeated=False),
    6: _over("denotation", is_repeated=False),
    7: _over("opaque_type", is_repeated=False),
    8: _over("sparse_tensor_type", is_repeated=False),
    9: _over("optional_type", is_repeated=False),
}
TENSOR_TYPE: Final[Table] = {1: _one("elem_type", _VARINT), 2: _one("shape")}
SHAPE: Final[Table] = {1: _many("dim", most=64)}
DIMENSION: Final[Table] = {
    1: _one("dim_value", _VARINT),
    2: _over("dim_param", is_repeated=False),
    3: _over("denotation", is_repeated=False),
}

# By domain, where "" is ONNX's own ("ai.onnx" is another name of it). What is left out draws random numbers, runs
# graphs of its own (If, Loop, Scan), makes tensors as large as a number says (Expand, Tile, Range), or is of no
# classical model.
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
