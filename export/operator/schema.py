"""The operator, once: its name, inputs, outputs, attributes, defaults and their ONNX schema.

Everything else (rules, portable bodies, the report, the exporter) takes names and defaults from
here. The semantics are those of ONNX ``Attention`` (opset 25 with its errata); see the operator's
documentation string below.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flashonnx.export.operator import cache_schema

if TYPE_CHECKING:
    import onnx_ir as ir

DOMAIN = "flashonnx"
VERSION = 1
OP_TYPE = "FlashAttention"

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen", "sinks", "bias")
OUTPUTS = ("Y", "present_key", "present_value", "lse")

QKV_LAYOUTS = ("separate", "3hd", "h3d", "gqa", "time_major")
EMPTY_ROWS = ("zero", "mean")

# None: no default, the attribute is absent unless given.
ATTRIBUTES: Mapping[str, Any] = MappingProxyType(
    {
        "is_causal": 0,
        "q_num_heads": None,
        "kv_num_heads": None,
        "scale": None,
        "softcap": 0.0,
        "left_window_size": -1,
        "right_window_size": -1,
        "softmax_precision": None,
        "empty_row": "zero",
        "qkv_layout": "separate",
    }
)

_ATTRIBUTE_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "is_causal": "INT",
        "q_num_heads": "INT",
        "kv_num_heads": "INT",
        "scale": "FLOAT",
        "softcap": "FLOAT",
        "left_window_size": "INT",
        "right_window_size": "INT",
        "softmax_precision": "INT",
        "empty_row": "STRING",
        "qkv_layout": "STRING",
        "fixed_split": "INT",
        "max_q_length": "INT",
        "max_kv_length": "INT",
        "rotary_interleaved": "INT",
        "rotary_dim": "INT",
    }
)
# Every operator of the domain, and what it has.
OPERATORS: Mapping[str, Mapping[str, Any]] = MappingProxyType({OP_TYPE: ATTRIBUTES, **cache_schema.ATTRIBUTES})

DOC = """
Exact attention, Y = softmax(softcap(scale * Q K^T) + attn_mask) V, in O(N) memory.

Q, K, V are (batch, sequence, heads * size) or (batch, heads, sequence, size); Y has Q's rank. Past
and present are (batch, heads, sequence, size). Head counts are required for three dimensions. With
qkv_layout other than "separate" Q alone carries the packed projections: "3hd" (B, S, 3, H, D),
"h3d" (B, S, H, 3, D), "gqa" (B, S, (Hq + 2 Hkv) D) or "time_major" (S, B, 3 H D).

Query i sees key j if j <= i + offset (is_causal), and i + offset - left_window_size <= j <= i +
offset + right_window_size (-1: no bound); offset is the past's length, or nonpad_kv_seqlen[b] minus
the query's length, or 0. attn_mask (bool: true attends; or an additive float) broadcasts to (batch,
heads, queries, keys) except in its last dimension, which is padded with -inf when it is shorter
than the keys. A masked score is a true -inf. A query that sees no key gives 0 (empty_row "zero") or
the mean of V over all keys below nonpad_kv_seqlen ("mean"). sinks (one float a query head) add
exp(sink) to the softmax's denominator. lse is the natural logarithm of the sum of exp(scores),
without the sink. bias (Hq D + Hkv D + Hkv Dv), packed as Q is, or Q's, K's and V's one behind the
other, is added to every row of them (not of the past) before anything else. scale defaults to 1 /
sqrt(size). Query head h uses key head h // (Hq / Hkv).
"""


def default(name: str) -> Any:
    """The default of attribute `name`; None when it has none."""
    return ATTRIBUTES[name]


def without_defaults(attributes: Mapping[str, Any], op_type: str = OP_TYPE) -> dict[str, Any]:
    """`attributes` in the schema's order, without None and without those at their default.

    Raises:
        ValueError: an attribute that the operator does not have.
    """
    known = OPERATORS[op_type]
    unknown = set(attributes) - set(known)
    if unknown:
        raise ValueError(f"{op_type} has no attribute {', '.join(sorted(unknown))}")
    return {
        name: attributes[name]
        for name, value in known.items()
        if attributes.get(name) is not None and attributes[name] != value
    }


def inputs_of(op_type: str) -> tuple[str, ...]:
    """The names of an operator's inputs."""
    return INPUTS if op_type == OP_TYPE else tuple(cache_schema.INPUTS[op_type])


def outputs_of(op_type: str) -> tuple[str, ...]:
    """The names of an operator's outputs."""
    return OUTPUTS if op_type == OP_TYPE else tuple(cache_schema.OUTPUTS[op_type])


def check_nodes(nodes: Iterable[ir.Node]) -> None:
    """Checks the attributes of nodes that were written by hand: a misspelt one would be ignored, not obeyed.

    Raises:
        ValueError: an attribute that the operator does not have, or one of another type or with an unknown word.
    """
    import difflib

    for node in nodes:
        if node.domain != DOMAIN or node.op_type not in OPERATORS:
            continue
        known = OPERATORS[node.op_type]
        layouts = QKV_LAYOUTS if node.op_type == OP_TYPE else cache_schema.QKV_LAYOUTS
        words = {"empty_row": EMPTY_ROWS, "qkv_layout": layouts}
        for name, attribute in node.attributes.items():
            what = f"{node.op_type} '{node.name}'"
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean '{close[0]}'?" if close else f"it has {', '.join(known)}"
                raise ValueError(f"{what} has no attribute '{name}': {hint}")
            if attribute.is_ref():
                continue
            if attribute.type.name != _ATTRIBUTE_TYPES[name]:
                expected, came = _ATTRIBUTE_TYPES[name].lower(), attribute.type.name.lower()
                raise ValueError(f"{what}: attribute '{name}' is expected to be of type {expected}, got {came}")
            if name in words and attribute.value not in words[name]:
                expected = ", ".join(words[name])
                raise ValueError(
                    f"{what}: attribute '{name}' is expected to be one of {expected}, got '{attribute.value}'"
                )


def register_schema() -> None:
    """Makes the operators known to onnx.checker and onnx.shape_inference; idempotent."""
    import onnx.defs

    if onnx.defs.has(OP_TYPE, DOMAIN):
        return
    onnx.defs.register_schema(_schema(OP_TYPE, DOC, _INPUT_TYPES, {"Q"}, _OUTPUT_TYPES, infer_shapes))
    for name, inputs in cache_schema.INPUTS.items():
        doc, required, outputs = cache_schema.DOCS[name], cache_schema.REQUIRED[name], cache_schema.OUTPUTS[name]
        onnx.defs.register_schema(_schema(name, doc, inputs, required, outputs, cache_schema.infer_shapes))


_INPUT_TYPES = {
    "Q": "T",
    "K": "T",
    "V": "T",
    "attn_mask": "M",
    "past_key": "T",
    "past_value": "T",
    "nonpad_kv_seqlen": "tensor(int64)",
    "sinks": "tensor(float)",
    "bias": "T",
}
_OUTPUT_TYPES = {"Y": "T", "present_key": "T", "present_value": "T", "lse": "tensor(float)"}
_FLOATS = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
_CONSTRAINTS = {
    "T": (_FLOATS, "float tensors"),
    "M": ((*_FLOATS, "tensor(bool)"), "a mask: bool, T or float32"),
    "R": (_FLOATS, "a table: T or float32"),
    "L": (("tensor(int32)", "tensor(int64)"), "lengths"),
}


def _schema(
    op_type: str, doc: str, inputs: Mapping[str, str], required: Collection[str], outputs: Mapping[str, str], infer: Any
) -> Any:
    import onnx
    from onnx.defs import OpSchema

    types = OpSchema.AttrType
    optional = OpSchema.FormalParameterOption.Optional

    def attribute(name: str, value: Any) -> Any:
        kind = getattr(types, _ATTRIBUTE_TYPES[name])
        if value is None:
            return OpSchema.Attribute(name, kind, "", required=False)
        return OpSchema.Attribute(name, onnx.helper.make_attribute(name, value), "")

    def parameter(name: str, kind: str, is_required: bool) -> Any:
        if is_required:
            return OpSchema.FormalParameter(name, kind)
        return OpSchema.FormalParameter(name, kind, param_option=optional)

    schema = OpSchema(
        op_type,
        DOMAIN,
        VERSION,
        doc=doc,
        inputs=[parameter(n, t, n in required) for n, t in inputs.items()],
        outputs=[parameter(n, t, n == "Y") for n, t in outputs.items()],
        type_constraints=[
            (name, list(kinds), words)
            for name, (kinds, words) in _CONSTRAINTS.items()
            if name in (*inputs.values(), *outputs.values())
        ],
        attributes=[attribute(name, value) for name, value in OPERATORS[op_type].items()],
    )
    schema.set_type_and_shape_inference_function(infer)
    return schema


def infer_shapes(context: Any) -> None:
    """Type and shape inference of the operator, for onnx.shape_inference.

    Sets what is certain (element types, ranks, the dimensions that come from one input) and leaves
    the rest open; it never raises on odd shapes, because the operator itself reports those better.
    """
    from onnx import TensorProto

    query = context.get_input_type(0).tensor_type
    attribute = _attribute_reader(context)
    for index in range(context.get_num_outputs()):
        if context.has_output(index):
            kind = TensorProto.FLOAT if index == OUTPUTS.index("lse") else query.elem_type
            _set_output(context, index, kind, None)
    if not query.HasField("shape"):
        return
    q_dims = list(query.shape.dim)
    if attribute("qkv_layout") != "separate" or len(q_dims) not in (3, 4):
        return
    heads = {"Q": attribute("q_num_heads"), "K": attribute("kv_num_heads")}
    heads["V"] = heads["K"]
    q = _four_dims(q_dims, heads["Q"])
    k = _input_dims(context, "K", heads)
    v = _input_dims(context, "V", heads)
    y_dims = [*q[:3], v[3]] if len(q_dims) == 4 else [q[0], q[2], _times(v[3], heads["Q"])]
    _set_output(context, 0, query.elem_type, y_dims)
    for name, new in (("present_key", k), ("present_value", v)):
        past = _input_dims(context, name.replace("present", "past"), {})
        total = new[2] if not context.has_input(INPUTS.index("past_key")) else _plus(new[2], past[2])
        _set_output(context, OUTPUTS.index(name), query.elem_type, [*new[:2], total, new[3]])
    _set_output(context, OUTPUTS.index("lse"), TensorProto.FLOAT, q[:3])


def _attribute_reader(context: Any) -> Any:
    import onnx

    def read(name: str) -> Any:
        attribute = context.get_attribute(name)
        if attribute is None or not attribute.name:
            return ATTRIBUTES[name]
        value = onnx.helper.get_attribute_value(attribute)
        return value.decode() if isinstance(value, bytes) else value

    return read


def _dim(value: int | None = None) -> Any:
    from onnx import TensorShapeProto

    dim = TensorShapeProto.Dimension()
    if value is not None:
        dim.dim_value = value
    return dim


def _four_dims(dims: list[Any], heads: int | None) -> list[Any]:
    """(B, heads, S, size) of a three- or four-dimensional input."""
    if len(dims) == 4:
        return dims
    size = _dim()
    if heads and dims[2].HasField("dim_value") and dims[2].dim_value % heads == 0:
        size = _dim(dims[2].dim_value // heads)
    return [dims[0], _dim(heads), dims[1], size]


def _input_dims(context: Any, name: str, heads: Mapping[str, int | None]) -> list[Any]:
    index = INPUTS.index(name)
    if context.has_input(index):
        tensor = context.get_input_type(index).tensor_type
        if tensor.HasField("shape") and len(tensor.shape.dim) in (3, 4):
            return _four_dims(list(tensor.shape.dim), heads.get(name))
    return [_dim(), _dim(), _dim(), _dim()]


def _plus(a: Any, b: Any) -> Any:
    known = a.HasField("dim_value") and b.HasField("dim_value")
    return _dim(a.dim_value + b.dim_value if known else None)


def _times(a: Any, factor: int | None) -> Any:
    return _dim(a.dim_value * factor if factor and a.HasField("dim_value") else None)


def _set_output(context: Any, index: int, kind: int, dims: list[Any] | None) -> None:
    from onnx import TypeProto

    if not context.has_output(index):
        return
    output = TypeProto()
    output.tensor_type.elem_type = kind
    if dims is not None:
        output.tensor_type.shape.dim.extend(dims)
    context.set_output_type(index, output)
