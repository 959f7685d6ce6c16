"""Function bodies of FlashAttentionKVCache: what it does with a cache in one piece, in standard operators.

The new keys come to their slots by a choice of every slot between what it had and what is new, so that no index is out
of range and nothing is written in place. Arithmetic is in float32.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from flashonnx.export.operator import schema
from flashonnx.export.operator.cache_schema import CACHE_INPUTS, KV_CACHE, OUTPUTS
from flashonnx.export.operator.nodes import NodeWriter
from flashonnx.export.values.facts import Facts
from onnx import TensorProto

_INPUTS, _OUTPUTS = tuple(CACHE_INPUTS), tuple(OUTPUTS[KV_CACHE])
_MINIMUM_OPSET = 13


@dataclasses.dataclass(frozen=True)
class CacheSignature:
    """All that a body depends on.

    Attributes:
        opset: version of the default domain, the model's own.
        inputs: those that the node has.
        outputs: likewise.
        attributes: every attribute that is not at its default, sorted.
        dtype: Q's element type.
        rank: Q's rank, 3 or 4.
        q_heads, kv_heads: head counts.
        size, value_size: head sizes.
        mask: "", "bool" or the float type's name.
        mask_rank: the mask's rank.
    """

    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, Any], ...]
    dtype: str
    rank: int
    q_heads: int
    kv_heads: int
    size: int
    value_size: int
    mask: str = ""
    mask_rank: int = 0

    def attribute(self, name: str) -> Any:
        """An attribute or its default."""
        return dict(self.attributes).get(name, schema.OPERATORS[KV_CACHE][name])

    @property
    def overload(self) -> str:
        """A short name, the same for equal signatures in every model."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]


def signature_of(facts: Facts, node: ir.Node, opset: int) -> CacheSignature:
    """The signature of a node.

    Raises:
        ValueError: there is no body for it, or what it depends on is not known.
    """
    if node.op_type != KV_CACHE:
        raise ValueError(f"{node.op_type} packs sequences, which standard operators cannot; it needs the library")
    given = dict(zip(_INPUTS, node.inputs, strict=False))
    for name in ("block_table", "cu_seqlens_q"):
        if given.get(name) is not None:
            raise ValueError(f"its {name} has no form in standard operators; it needs the library")
    if opset < _MINIMUM_OPSET:
        raise ValueError(f"opset {opset} is below {_MINIMUM_OPSET}")
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    query, keys, values = (facts.dims(given[name]) for name in ("Q", "key_cache", "value_cache"))
    dtype, mask = facts.dtype(given["Q"]), given.get("attn_mask")
    if query is None or dtype is None or keys is None or values is None:
        raise ValueError("the shapes of its Q and of its caches are not known")
    heads = query[1].value if len(query) == 4 else attributes.get("q_num_heads")
    kv_heads, size, value_size = keys[1].value, keys[3].value, values[3].value
    if heads is None or kv_heads is None or size is None or value_size is None:
        raise ValueError("its heads and sizes are not known")
    mask_dims, mask_type = facts.dims(mask), facts.dtype(mask)
    if mask is not None and (mask_dims is None or mask_type is None):
        raise ValueError("the rank of its mask is not known")
    return CacheSignature(
        opset,
        tuple(name for name in _INPUTS if given.get(name) is not None),
        tuple(name for name, value in zip(_OUTPUTS, node.outputs, strict=False) if value.name),
        tuple(sorted(attributes.items())),
        dtype.name.lower(),
        len(query),
        int(heads),
        kv_heads,
        size,
        value_size,
        mask_type.name.lower() if mask_type is not None else "",
        len(mask_dims) if mask_dims is not None else 0,
    )


def function_of(signature: CacheSignature) -> onnx.FunctionProto:
    """The model-local function of `signature`."""
    writer = NodeWriter()
    _Body(writer, signature).write()

    def formals(names: Sequence[str], present: Sequence[str]) -> list[str]:
        end = max(names.index(name) for name in present) + 1
        return [name if name in present else f"no_{name}" for name in names[:end]]

    outputs = formals(_OUTPUTS, signature.outputs)
    for name in outputs:
        if name.startswith("no_"):
            writer.op("Constant", value=np.zeros(0, np.float32), to=name)
    return onnx.helper.make_function(
        schema.DOMAIN,
        KV_CACHE,
        formals(_INPUTS, signature.inputs),
        outputs,
        writer.nodes,
        [onnx.helper.make_opsetid("", signature.opset)],
        overload=signature.overload,
        doc_string="What flashonnx::FlashAttentionKVCache computes, in standard operators.",
    )


class _Body:
    def __init__(self, w: NodeWriter, s: CacheSignature) -> None:
        self.w, self.s = w, s

    def write(self) -> None:
        w, s = self.w, self.s
        query, key, value = self._packed() if s.attribute("qkv_layout") == "gqa" else "QKV"
        q, count = self._tokens(query, s.q_heads, s.size), w.size("Q", 1 if s.rank == 3 else 2)
        capacity = w.size("key_cache", 2)
        given = self._cast(w.op("Reshape", "cache_lengths", w.ints(-1, 1)), TensorProto.INT64)
        before = w.op("Max", w.op("Min", given, capacity), w.ints(0))  # (B, 1)
        steps, slots = self._range(count), self._range(capacity)
        appends = "K" in s.inputs or query != "Q"
        total = w.op("Min", w.op("Add", before, count), capacity) if appends else before
        first = before if appends else w.op("Sub", before, count)
        turns = self._turns(w.op("Add", steps, first)) if "cos_cache" in s.inputs else None
        q = self._rotated(q, turns, s.q_heads)
        keys, values = self._float("key_cache"), self._float("value_cache")
        if appends:
            place = w.op("Sub", slots, before)  # (B, capacity): which new token each slot gets
            is_new = w.op("And", w.op("GreaterOrEqual", place, w.ints(0)), w.op("Less", place, count))
            last = w.op("Max", w.op("Sub", count, w.ints(1)), w.ints(0))
            index = w.op("Unsqueeze", w.op("Max", w.op("Min", place, last), w.ints(0)), w.ints(2))
            is_new = w.op("Unsqueeze", is_new, w.ints(1, 3))
            new = self._rotated(self._tokens(key, s.kv_heads, s.size), turns, s.kv_heads)
            keys = w.op("Where", is_new, self._placed(new, index), keys)
            values = w.op("Where", is_new, self._placed(self._tokens(value, s.kv_heads, s.value_size), index), values)
        keys, values = self._present(keys, "present_key_cache"), self._present(values, "present_value_cache")
        filled = w.op("Unsqueeze", w.op("Less", slots, total), w.ints(1, 3))  # others may hold anything
        keys, values = (self._repeated(w.op("Where", filled, x, w.number(0.0))) for x in (keys, values))
        scale = s.attribute("scale") or 1.0 / math.sqrt(s.size)
        scores = w.op("MatMul", w.op("Mul", q, w.number(scale)), w.op("Transpose", keys, perm=[0, 1, 3, 2]))
        if s.attribute("softcap"):
            cap = w.number(s.attribute("softcap"))
            scores = w.op("Mul", w.op("Tanh", w.op("Div", scores, cap)), cap)
        scores = self._masked(scores, capacity)
        position = w.op("Add", steps, w.op("Sub", total, count))  # (B, S)
        scores = w.op("Where", self._seen(slots, total, position), scores, w.number(-np.inf))
        y = w.op("MatMul", self._softmax(scores), values)
        if s.rank == 3:
            y = w.op("Reshape", w.op("Transpose", y, perm=[0, 2, 1, 3]), w.ints(0, 0, s.q_heads * s.value_size))
        self._result(y, "Y")

    # -- pieces

    def _cast(self, value: str, kind: int, to: str | None = None) -> str:
        return self.w.op("Cast", value, to_type=kind, to=to)

    def _packed(self) -> list[str]:
        """Q, K and V, which stand side by side in Q."""
        s = self.s
        ends = np.cumsum([0, s.q_heads * s.size, s.kv_heads * s.size, s.kv_heads * s.value_size]).tolist()
        pairs = itertools.pairwise(ends)
        return [self.w.op("Slice", "Q", *(self.w.ints(n) for n in (start, end, 2))) for start, end in pairs]

    def _float(self, name: str) -> str:
        return name if self.s.dtype == "float" else self._cast(name, TensorProto.FLOAT)

    def _result(self, value: str, name: str) -> None:
        if self.s.dtype == "float":
            self.w.op("Identity", value, to=name)
        else:
            self._cast(value, getattr(TensorProto, self.s.dtype.upper()), to=name)

    def _present(self, value: str, name: str) -> str:
        """`value` in the caches' type, as an output if that is asked for, and as float32 again."""
        if name in self.s.outputs:
            self._result(value, name)
            return self._float(name)
        if self.s.dtype == "float":
            return value
        return self._cast(self._cast(value, getattr(TensorProto, self.s.dtype.upper())), TensorProto.FLOAT)

    def _range(self, count: str) -> str:
        zero, one = (self.w.constant(np.array(number, np.int64)) for number in (0, 1))
        return self.w.op("Range", zero, self.w.op("Squeeze", count), one)

    def _tokens(self, name: str, heads: int, size: int) -> str:
        """(B, heads, S, size) in float32."""
        value = self._float(name)
        if self.s.rank == 4:
            return value
        split = self.w.op("Reshape", value, self.w.ints(0, 0, heads, size))
        return self.w.op("Transpose", split, perm=[0, 2, 1, 3])

    def _placed(self, new: str, index: str) -> str:
        """New tokens (B, heads, S, size) by slot, (B, heads, capacity, size)."""
        by_token = self.w.op("Transpose", new, perm=[0, 2, 1, 3])
        return self.w.op("Transpose", self.w.op("GatherND", by_token, index, batch_dims=1), perm=[0, 2, 1, 3])

    def _repeated(self, x: str) -> str:
        if self.s.q_heads == self.s.kv_heads:
            return x
        group = self.s.q_heads // self.s.kv_heads
        return self.w.op("Gather", x, self.w.ints(*(head // group for head in range(self.s.q_heads))), axis=1)

    def _turns(self, positions: str) -> tuple[str, str]:
        """Cosines and sines of the positions, (B, 1, S, rotary_dim / 2)."""
        w = self.w
        if "position_ids" in self.s.inputs:
            positions = "position_ids"
        last = w.op("Sub", w.size("cos_cache", 0), w.ints(1))
        rows = w.op("Max", w.op("Min", positions, last), w.ints(0))
        found = []
        for name in ("cos_cache", "sin_cache"):
            table = self._cast(w.op("Gather", name, rows, axis=0), TensorProto.FLOAT)
            if self.s.attribute("rotary_dim"):
                table = w.op("Slice", table, w.ints(0), w.ints(self.s.attribute("rotary_dim") // 2), w.ints(2))
            found.append(w.op("Unsqueeze", table, w.ints(1)))
        return found[0], found[1]

    def _rotated(self, x: str, turns: tuple[str, str] | None, heads: int) -> str:
        if turns is None:
            return x
        w, (cos, sin) = self.w, turns
        half = w.size(cos, 3)
        width, end = w.op("Mul", half, w.ints(2)), w.ints(np.iinfo(np.int64).max)
        turned, rest = w.op("Slice", x, w.ints(0), width, w.ints(3)), w.op("Slice", x, width, end, w.ints(3))
        if self.s.attribute("rotary_interleaved"):
            pairs = w.op("Reshape", turned, w.op("Concat", w.ints(0, 0, 0), half, w.ints(2), axis=0))
            a, b = (w.op("Gather", pairs, w.constant(np.array(i, np.int64)), axis=4) for i in (0, 1))
        else:
            a, b = w.op("Slice", turned, w.ints(0), half, w.ints(3)), w.op("Slice", turned, half, width, w.ints(3))
        first = w.op("Sub", w.op("Mul", a, cos), w.op("Mul", b, sin))
        second = w.op("Add", w.op("Mul", b, cos), w.op("Mul", a, sin))
        if self.s.attribute("rotary_interleaved"):
            both = w.op("Concat", *(w.op("Unsqueeze", part, w.ints(4)) for part in (first, second)), axis=4)
            joined = w.op("Reshape", both, w.op("Concat", w.ints(0, 0, 0), width, axis=0))
            return w.op("Concat", joined, rest, axis=3)
        return w.op("Concat", first, second, rest, axis=3)

    def _masked(self, scores: str, capacity: str) -> str:
        """With the mask, whose last dimension may be shorter than the cache."""
        w, s = self.w, self.s
        if not s.mask:
            return scores
        mask = "attn_mask"
        if s.mask == "bool":
            mask = w.op("Where", mask, w.number(0.0), w.number(-np.inf))
        elif s.mask != "float":
            mask = self._cast(mask, TensorProto.FLOAT)
        missing = w.op("Max", w.op("Sub", capacity, w.size(mask, -1)), w.ints(0))
        pads = w.op("Concat", w.ints(*[0] * (2 * s.mask_rank - 1)), missing, axis=0)
        mask = w.op("Slice", w.op("Pad", mask, pads, w.number(-np.inf)), w.ints(0), capacity, w.ints(-1))
        return w.op("Add", scores, mask)

    def _seen(self, slots: str, total: str, position: str) -> str:
        """(B, 1, S or 1, capacity): filled, and within the triangle and the windows."""
        w, s = self.w, self.s
        seen = w.op("Less", slots, w.op("Reshape", total, w.ints(-1, 1, 1, 1)))
        place = w.op("Unsqueeze", position, w.ints(1, 3))
        right, left = s.attribute("right_window_size"), s.attribute("left_window_size")
        bounds = [0] * bool(s.attribute("is_causal")) + [right] * (right >= 0)
        if bounds:
            seen = w.op("And", seen, w.op("LessOrEqual", slots, w.op("Add", place, w.ints(min(bounds)))))
        if left >= 0:
            seen = w.op("And", seen, w.op("GreaterOrEqual", slots, w.op("Sub", place, w.ints(left))))
        return seen

    def _softmax(self, scores: str) -> str:
        """The weights, zero where no key is seen; the log of their sum, if that is asked for."""
        w, s, zero = self.w, self.s, self.w.number(0.0)
        top = self._reduce("ReduceMax", scores)
        empty = w.op("Equal", top, w.number(-np.inf))
        finite = w.op("Where", empty, zero, top)
        if "lse" in s.outputs:
            total = self._reduce("ReduceSum", w.op("Exp", w.op("Sub", scores, finite)))
            w.op("Squeeze", w.op("Add", finite, w.op("Log", total)), w.ints(3), to="lse")
        if "sinks" in s.inputs:
            heads = w.op("Reshape", "sinks", w.ints(1, -1, 1, 1))
            column = w.op("Add", w.op("Mul", finite, zero), heads)
            weights = w.op("Softmax", w.op("Concat", scores, column, axis=3), axis=3)
            return w.op("Slice", weights, w.ints(0), w.ints(-1), w.ints(3))
        weights = w.op("Softmax", w.op("Where", empty, zero, scores), axis=3)
        return w.op("Where", empty, zero, weights)

    def _reduce(self, op_type: str, value: str) -> str:
        """Over the last axis, kept."""
        if op_type == "ReduceMax" and self.s.opset < 18:
            return self.w.op(op_type, value, axes=[-1], keepdims=1)
        return self.w.op(op_type, value, self.w.ints(-1), keepdims=1)
