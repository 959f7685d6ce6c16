"""The fused nodes of a model as problems: their sizes, what they ask for, and which kernel would do them where."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from ctypes import c_int64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashonnx._capi import CPU, CUDA, DTYPES, EMPTY_ROW, Device, Library, Params, Tensor
from flashonnx._inputs import evaluate, names_in
from flashonnx.cli import _cache

if TYPE_CHECKING:
    import onnx

Dim = int | str | None
# Devices that need not be here, by compute capability: a card of that kind, its multiprocessors, and the shared memory
# that a block may ask for (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
GPUS = {
    80: ("A100", 108, 163),
    86: ("A10", 72, 99),
    89: ("L4", 58, 99),
    90: ("H100", 132, 227),
    100: ("B200", 148, 227),
    120: ("RTX 5090", 170, 99),
}
SHOWN = (80, 86, 89, 90, 120)
_LENGTH = 1024
_INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen", "sinks", "bias")
_OUTPUTS = ("Y", "present_key", "present_value", "lse")


@dataclass
class Attention:
    """A node of flashonnx's. Sizes are numbers, names or expressions of names, or None where the model does not say.

    Attributes:
        node: its name.
        op: its operator.
        dtype: of Q, K and V; "" if not known.
        sizes: batch, q_heads, kv_heads, queries, keys, past, head_dim, value_dim.
        mask: dimensions and type of attn_mask; None without.
        attributes: of the node.
        has: which optional inputs and outputs are there.
    """

    node: str
    op: str
    dtype: str
    sizes: dict[str, Dim]
    mask: tuple[tuple[Dim, ...], str] | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    has: frozenset[str] = frozenset()

    @property
    def features(self) -> list[str]:
        """What it asks for beyond softmax(scale Q Kᵀ) V, in words."""
        words = ["causal"] if self.is_causal else []
        left, right = (self.attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
        words += [f"window {left},{right}"] if left >= 0 or right >= 0 else []
        if self.mask is not None:
            dims = "×".join("?" if dim is None else str(dim) for dim in self.mask[0])
            words.append(f"mask {dims} {self.mask[1]}".rstrip())
        words += [f"softcap {self.attributes['softcap']:g}"] if self.attributes.get("softcap") else []
        names = {"past_key": "past", "nonpad_kv_seqlen": "lengths", "sinks": "sinks", "lse": "lse", "bias": "bias"}
        words += [word for name, word in names.items() if name in self.has]
        words += ["mean of empty rows"] if self.attributes.get("empty_row") == "mean" else []
        return _cache.features(self.op, self.has) + words

    @property
    def is_causal(self) -> int:
        """As given, or the operator's default."""
        return int(self.attributes.get("is_causal", self.op == "FlashAttentionKVCache"))

    def at(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Its sizes in numbers.

        Raises:
            ValueError: one is not known.
        """
        return {name: _number(size, lengths, name) for name, size in self.sizes.items()}

    def names(self) -> list[str]:
        """The names that its sizes are made of, those of the batch first."""
        return [name for size in self.sizes.values() if isinstance(size, str) for name in names_in(size)]

    def example(self, name: str) -> int:
        """A value for one of these names that nobody gave: one batch entry, and about a thousand of anything else."""
        if name == self.sizes["batch"]:
            return 1
        return _cache.example(self.sizes, name) or _LENGTH

    def params(self, library: Library, device: Device, lengths: Mapping[str, int]) -> Params:
        """The problem for the library, without data.

        Raises:
            ValueError: a size or the type is not known.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"the type of Q is not known: '{self.dtype}'" if self.dtype else "the type is not known")
        n, kind = self.at(lengths), DTYPES[self.dtype]
        p = library.params()
        p.device = device
        p.batch, p.q_heads, p.kv_heads = n["batch"], n["q_heads"], n["kv_heads"]
        p.q_length, p.kv_length, p.past_length = n["queries"], n["keys"] - n["past"], n["past"]
        p.head_dim, p.value_dim = n["head_dim"], n["value_dim"]
        p.q = _tokens(kind, n["q_heads"], n["queries"], n["head_dim"])
        p.o = _tokens(kind, n["q_heads"], n["queries"], n["value_dim"])
        p.k = _tokens(kind, n["kv_heads"], p.kv_length, n["head_dim"])
        p.v = _tokens(kind, n["kv_heads"], p.kv_length, n["value_dim"])
        for name, dim in (("k", n["head_dim"]), ("v", n["value_dim"])):
            whole = "key" if name == "k" else "value"
            if f"past_{whole}" in self.has:
                setattr(p, f"past_{name}", _heads(kind, n["kv_heads"], n["past"], dim))
            if f"present_{whole}" in self.has:
                setattr(p, f"present_{name}", _heads(kind, n["kv_heads"], n["keys"], dim))
        if "past_key" in self.has:
            p.causal_offset = n["past"]
        if self.mask is not None:
            p.mask, p.mask_keys = self._mask(n, lengths)
        if "nonpad_kv_seqlen" in self.has:
            p.key_lengths, p.offset_from_lengths = Tensor(None, (c_int64 * 4)(1, 0, 0, 0), DTYPES["int64"]), 1
        if "sinks" in self.has:
            p.sinks = Tensor(None, (c_int64 * 4)(1, 0, 0, 0), DTYPES["float32"])
        if "bias" in self.has:
            for name, dim in (("q_bias", p.head_dim), ("k_bias", p.head_dim), ("v_bias", p.value_dim)):
                setattr(p, name, Tensor(None, (c_int64 * 4)(0, dim, 0, 1), kind))
        if "lse" in self.has:
            p.lse = _heads(DTYPES["float32"], n["q_heads"], n["queries"], 1)
        p.is_causal, p.softcap = self.is_causal, self.attributes.get("softcap", 0.0)
        p.window_left = self.attributes.get("left_window_size", -1)
        p.window_right = self.attributes.get("right_window_size", -1)
        p.empty_row = EMPTY_ROW[self.attributes.get("empty_row", "zero")]
        if self.op != "FlashAttention":
            _cache.fill(p, self.op, n, kind, self.has, self.attributes)
        return p

    def _mask(self, n: Mapping[str, int], lengths: Mapping[str, int]) -> tuple[Tensor, int]:
        assert self.mask is not None
        dims = [1] * (4 - len(self.mask[0])) + [_number(dim, lengths, "attn_mask") for dim in self.mask[0]]
        strides, step = [0] * 4, 1
        for axis in (3, 2, 1, 0):
            strides[axis] = step if dims[axis] != 1 or axis == 3 else 0
            step *= dims[axis]
        kind = self.mask[1] if self.mask[1] in DTYPES else self.dtype
        return Tensor(None, (c_int64 * 4)(*strides), DTYPES[kind]), dims[3]


_NO_KERNELS = "this build of the library has no kernels for the device"  # the library's words, if it has none at all
_NEEDS_CUDA = "it was built without CUDA, and only one that was built with it (where nvcc is) has them"


def kernel(library: Library, attention: Attention, lengths: Mapping[str, int], arch: int) -> tuple[str, str]:
    """The kernel that would run on a device of that compute capability (0: the CPU), or "" and why there is none.

    It is the library's own answer, to a device that is described by hand.
    """
    try:
        params = attention.params(library, device_of(arch), lengths)
        return library.supported(params), ""
    except (ValueError, NotImplementedError, RuntimeError) as error:
        why = str(error)
        return "", f"{why}; {_NEEDS_CUDA}" if arch and why.endswith(_NO_KERNELS) else why


def device_of(arch: int) -> Device:
    """A device described by hand."""
    if arch == 0:
        return Device(CPU, 0, 0, 0, 0)
    _, multiprocessors, shared = GPUS[arch]
    return Device(CUDA, 0, arch, multiprocessors, shared << 10)


def attentions(model: onnx.ModelProto) -> list[Attention]:
    """The nodes of flashonnx's in a model, in order, those of subgraphs before the nodes that have them."""
    import onnx

    with contextlib.suppress(Exception):  # if it is damaged, or larger than protobuf allows: what the model itself says
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    known: dict[str, Any] = {}
    _learn(model.graph, known)
    for function in model.functions:
        if function.domain != "flashonnx":
            known |= {value.name: value.type for value in function.value_info}
    found: list[Attention] = []
    _collect(model.graph.node, known, found)
    for function in model.functions:
        if function.domain != "flashonnx":
            _collect(function.node, known, found)
    return found


def _learn(graph: onnx.GraphProto, known: dict[str, Any]) -> None:
    import onnx

    for value in (*graph.input, *graph.value_info, *graph.output):
        known[value.name] = value.type
    for tensor in graph.initializer:
        known[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _learn(inner, known)


def _collect(nodes: Any, known: Mapping[str, Any], found: list[Attention]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _collect(inner.node, known, found)
        if node.domain == "flashonnx" and node.op_type in ("FlashAttention", *_cache.INPUTS):
            found.append(_read(node, known))


def _read(node: onnx.NodeProto, known: Mapping[str, Any]) -> Attention:
    import onnx

    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    attributes = {name: v.decode() if isinstance(v, bytes) else v for name, v in attributes.items()}
    inputs = {
        name: value for name, value in zip(_cache.INPUTS.get(node.op_type, _INPUTS), node.input, strict=False) if value
    }
    has = {
        *inputs,
        *(name for name, value in zip(_cache.OUTPUTS.get(node.op_type, _OUTPUTS), node.output, strict=False) if value),
    }
    shapes = {name: _shape(known.get(value)) for name, value in inputs.items()}
    mask = (shapes["attn_mask"], _dtype(known.get(inputs["attn_mask"]))) if "attn_mask" in inputs else None
    if mask is not None and not mask[0]:
        mask = (("?",), mask[1])
    label = node.name or node.output[0]
    plain = node.op_type == "FlashAttention"
    sizes = _sizes(attributes, shapes) if plain else _cache.sizes(node.op_type, attributes, shapes)
    return Attention(label, node.op_type, _dtype(known.get(node.input[0])), sizes, mask, attributes, frozenset(has))


def _sizes(attributes: Mapping[str, Any], shapes: Mapping[str, tuple[Dim, ...]]) -> dict[str, Dim]:
    q, k, v = (shapes.get(name, ()) for name in "QKV")
    heads: Dim = attributes.get("q_num_heads")
    kv_heads: Dim = attributes.get("kv_num_heads", heads)
    layout = attributes.get("qkv_layout", "separate")
    sizes: dict[str, Dim] = dict.fromkeys(
        ("batch", "q_heads", "kv_heads", "queries", "keys", "past", "head_dim", "value_dim")
    )
    sizes |= {"q_heads": heads, "kv_heads": kv_heads, "past": 0}
    if layout != "separate":
        batch, length = (1, 0) if layout == "time_major" else (0, 1)
        if len(q) >= 3:
            if len(q) == 5:
                sizes["q_heads"] = sizes["kv_heads"] = q[3 if layout == "3hd" else 2]
                width = q[4]
            else:
                parts = 3 * heads if isinstance(heads, int) else None
                if layout == "gqa" and isinstance(heads, int) and isinstance(kv_heads, int):
                    parts = heads + 2 * kv_heads
                width = q[2] // parts if parts and isinstance(q[2], int) else None
            sizes |= {"batch": q[batch], "queries": q[length], "keys": q[length], "head_dim": width, "value_dim": width}
        return sizes
    if len(q) == 4:
        sizes |= {"batch": q[0], "q_heads": q[1], "queries": q[2], "head_dim": q[3]}
        sizes |= {"kv_heads": k[1], "keys": k[2]} if len(k) == 4 else {}
        sizes["value_dim"] = v[3] if len(v) == 4 else None
    elif len(q) == 3:
        sizes |= {"batch": q[0], "queries": q[1], "head_dim": _part(q[2], heads)}
        sizes["keys"] = k[1] if len(k) == 3 else None
        sizes["value_dim"] = _part(v[2], kv_heads) if len(v) == 3 else None
    past = shapes.get("past_key", ())
    if len(past) == 4:
        sizes["past"] = past[2]
        sizes["keys"] = _sum(past[2], sizes["keys"])
    return sizes


def _part(whole: Dim, count: Dim) -> Dim:
    return whole // count if isinstance(whole, int) and isinstance(count, int) and count else None


def _sum(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return None if a is None or b is None else f"{a} + {b}"


def _shape(kind: Any) -> tuple[Dim, ...]:
    if kind is None or not kind.tensor_type.HasField("shape"):
        return ()
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.tensor_type.shape.dim)


def _dtype(kind: Any) -> str:
    import onnx

    if kind is None or not kind.tensor_type.elem_type:
        return ""
    name = onnx.TensorProto.DataType.Name(kind.tensor_type.elem_type).lower()
    return "float32" if name == "float" else name


def _number(dim: Dim, lengths: Mapping[str, int], name: str) -> int:
    if isinstance(dim, int):
        return dim
    if dim is None:
        raise ValueError(f"the model does not say its {name}")
    try:
        return evaluate(dim, lengths, name)
    except ValueError:
        raise ValueError(f"its {name} are '{dim}', and that is not known: give its parts by --dim") from None


def _tokens(kind: int, heads: int, length: int, dim: int) -> Tensor:
    """(B, H, S, D) whose memory is (B, S, H, D)."""
    return Tensor(None, (c_int64 * 4)(length * heads * dim, dim, heads * dim, 1), kind)


def _heads(kind: int, heads: int, length: int, dim: int) -> Tensor:
    return Tensor(None, (c_int64 * 4)(heads * length * dim, length * dim, dim, 1), kind)
