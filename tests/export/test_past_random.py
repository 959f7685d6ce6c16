"""fuse(kv_cache=...) on decoders spelt at random: what is taken gives each sentence what it gets alone."""

from __future__ import annotations

import collections
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import has_library, session
from onnx import TensorProto, helper, numpy_helper

COUNTS, LENGTHS, CAPACITY = [4, 1, 3, 2, 2, 1, 4, 3], [3, 0, 6, 1, 5, 2, 0, 4], 16
LOWEST = {TensorProto.FLOAT: (-3.4028234663852886e38, -np.inf, -1e9), TensorProto.FLOAT16: (-65504.0, -np.inf)}


class Decoder:
    """One or two layers of attention with a past, in a random spelling.

    Attributes:
        model: it.
        batch: sentences; slots: new tokens of each, where that is fixed (else None).
    """

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.nodes, self.weights, self.said = list[onnx.NodeProto](), list[onnx.TensorProto](), list[str]()
        self.opset = draw.choice([14, 17, 18, 20, 23])
        self.kind = draw.choice([TensorProto.FLOAT] * 3 + [TensorProto.FLOAT16])
        self.kv_heads, self.size = draw.choice([1, 2, 4]), draw.choice([4, 8])
        self.heads = self.kv_heads * draw.choice([1, 2])
        self.batch = draw.choice([None, None, 1, self.heads, self.kv_heads, 3])
        self.slots = draw.choice([None, None, None, 1, 4])
        self.lowest = draw.choice(LOWEST[self.kind])
        self.width = self.heads * self.size
        b, s = self.batch or "b", self.slots or "s"
        self.inputs = [helper.make_tensor_value_info("inputs_embeds", self.kind, [b, s, self.width])]
        self.has_mask, self.positions = draw.random() < 0.6, draw.choice([None, (b, s), (1, s), (s,)])
        if self.has_mask:
            self.inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, [b, "keys"]))
        if self.positions:
            name = "cache_position" if len(self.positions) == 1 else "position_ids"
            self.inputs.append(helper.make_tensor_value_info(name, TensorProto.INT64, self.positions))
        outputs = []
        self._sizes()
        x, mask = "inputs_embeds", None
        for layer in range(draw.choice([1, 1, 2])):
            for role in ("key", "value"):
                shape = [b, self.kv_heads, "past", self.size]
                self.inputs.append(helper.make_tensor_value_info(f"past_key_values.{layer}.{role}", self.kind, shape))
                shape[2] = "keys"
                outputs.append(helper.make_tensor_value_info(f"present.{layer}.{role}", self.kind, shape))
            if mask is None or draw.random() < 0.5:
                mask = self._seen()
            x = self._layer(layer, x, mask)
        self.op("Identity", x, output="logits")
        outputs.insert(0, helper.make_tensor_value_info("logits", self.kind, [b, s, self.width]))
        graph = helper.make_graph(self.nodes, "g", self.inputs, outputs, self.weights)
        self.model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    # -- writing

    def op(self, op_type: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        name = output or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=f"n_{name}", **attributes))
        return name

    def constant(self, value: Any, kind: int | None = None) -> str:
        name = f"c{len(self.weights)}"
        array = np.asarray(value, helper.tensor_dtype_to_np_dtype(kind or TensorProto.INT64))
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self.numbers.standard_normal(shape) / shape[0] ** 0.5, self.kind)

    def axes_op(self, op_type: str, value: str, axes: list[int]) -> str:
        return self.op(op_type, value, self.constant(axes))

    def pick(self, **ways: Any) -> Any:
        """One of several ways to write something, which is noted."""
        name = self.draw.choice(list(ways))
        self.said.append(name)
        return ways[name]()

    def size_of(self, value: str, axis: int) -> str:
        """One-dimensional."""
        shape = self.op("Shape", value)
        return self.pick(
            gathered=lambda: self.op("Gather", shape, self.constant([axis]), axis=0),
            sliced=lambda: self.op(
                "Slice", shape, self.constant([axis]), self.constant([axis + 1]), self.constant([0])
            ),
        )

    def scalar(self, value: str) -> str:
        return self.op("Squeeze", value, self.constant([0]))

    def _sizes(self) -> None:
        self.s1 = self.size_of("inputs_embeds", 1)
        self.p1 = self.size_of("past_key_values.0.key", 2)
        self.t1 = self.op("Add", self.p1, self.s1)
        self.s, self.p, self.t = map(self.scalar, (self.s1, self.p1, self.t1))

    # -- masks

    def arange(self, start: str, end: str) -> str:
        return self.op("Range", start, end, self.constant(1))

    def places(self) -> str:
        """Of new tokens, (s,) or with a batch."""
        zero = self.constant(0)
        given = {}
        if self.positions:
            name = "cache_position" if len(self.positions) == 1 else "position_ids"
            given["given"] = lambda: name
        return self.pick(
            ranged=lambda: self.arange(self.p, self.t),
            summed=lambda: self.op("Add", self.arange(zero, self.s), self.p),
            cut=lambda: self.op("Slice", self.arange(zero, self.t), self.p1, self.t1, self.constant([0])),
            **given,
        )

    def _seen(self) -> str:
        """(.., 1, s, keys): true where a token sees a key."""
        places = self.places()
        if places != "position_ids":
            rows = self.axes_op("Unsqueeze", places, [0, 1, 3])
        else:
            rows = self.axes_op("Unsqueeze", places, [1, 3])
        keys = self.axes_op("Unsqueeze", self.arange(self.constant(0), self.t), [0, 1, 2])
        one = self.constant(1)
        seen = (
            self.pick(
                below=lambda: self.op("LessOrEqual", keys, rows),
                above=lambda: self.op("GreaterOrEqual", rows, keys),
                not_above=lambda: self.op("Not", self.op("Greater", keys, rows)),
                less=lambda: self.op("Less", keys, self.op("Add", rows, one)),
                apart=lambda: self.op("GreaterOrEqual", self.op("Sub", rows, keys), self.constant(0)),
                first_key=lambda: self.op("LessOrEqual", keys, self.op("Sub", rows, self.p)),
            )
            if self.draw.random() < 0.95
            else self.op("Less", keys, self.op("Add", rows, self.constant(2)))
        )
        if self.draw.random() < 0.3:
            near = self.op("Less", self.op("Sub", rows, keys), self.constant(3))
            seen = self.op("And", seen, near)
            self.said.append("window")
        if self.has_mask:
            real = self.pick(
                cast=lambda: self.op("Cast", "attention_mask", to=TensorProto.BOOL),
                equal=lambda: self.op("Equal", "attention_mask", one),
                above=lambda: self.op("Greater", "attention_mask", self.constant(0)),
            )
            seen = self.op("And", seen, self.axes_op("Unsqueeze", real, [1, 2]))
        return seen

    def masked(self, scores: str, seen: str) -> str:
        zero, low = self.constant(0, self.kind), self.constant(self.lowest, self.kind)
        return self.pick(
            where=lambda: self.op("Where", seen, scores, low),
            where_not=lambda: self.op("Where", self.op("Not", seen), low, scores),
            added=lambda: self.op("Add", scores, self.op("Where", seen, zero, low)),
        )

    # -- layers

    def turned(self, x: str, places: str) -> str:
        """Rotary: halves."""
        half = self.size // 2
        has_batch = places == "position_ids"
        if not has_batch and self.draw.random() < 0.9:  # else none is found for each sentence
            places, has_batch = self.axes_op("Unsqueeze", places, [0]), True
        frequency = self.constant(10.0 ** -np.arange(half), TensorProto.FLOAT)
        column = self.axes_op("Unsqueeze", self.op("Cast", places, to=TensorProto.FLOAT), [-1])
        angles = self.op("Mul", column, frequency)
        angles = self.op("Concat", angles, angles, axis=-1)
        tables = []
        for function in ("Cos", "Sin"):
            table = self.op("Cast", self.op(function, angles), to=self.kind)
            tables.append(self.axes_op("Unsqueeze", table, [1] if has_batch else [0, 1]))
        low = self.op("Slice", x, *(self.constant([n]) for n in (0, half, 3)))
        high = self.op("Slice", x, *(self.constant([n]) for n in (half, self.size, 3)))
        other = self.op("Concat", self.op("Neg", high), low, axis=3)
        return self.op("Add", self.op("Mul", x, tables[0]), self.op("Mul", other, tables[1]))

    def by_heads(self, x: str, heads: int) -> str:
        y = self.op("MatMul", x, self.weight(self.width, heads * self.size))
        shape = self.pick(
            zeros=lambda: self.constant([0, 0, heads, self.size]),
            inferred=lambda: self.op("Concat", self.size_of(x, 0), self.constant([-1]),
                                     self.constant([heads, self.size]), axis=0),
        )  # fmt: skip
        return self.op("Transpose", self.op("Reshape", y, shape), perm=[0, 2, 1, 3])

    def repeated(self, x: str) -> str:
        groups = self.heads // self.kv_heads
        if groups == 1:
            return x
        b = self.size_of(x, 0)

        def expanded(op: str) -> str:
            wide = self.axes_op("Unsqueeze", x, [2])
            if op == "Tile":
                wide = self.op("Tile", wide, self.constant([1, 1, groups, 1, 1]))
            else:
                wide = self.op("Expand", wide, self.constant([1, 1, groups, 1, 1]))
            shape = self.op("Concat", b, self.constant([self.heads]), self.t1, self.constant([self.size]), axis=0)
            return self.op("Reshape", wide, shape)

        index = np.repeat(np.arange(self.kv_heads), groups)
        return self.pick(
            tiled=lambda: expanded("Tile"), expanded=lambda: expanded("Expand"),
            gathered=lambda: self.op("Gather", x, self.constant(index), axis=1),
        )  # fmt: skip

    def _layer(self, layer: int, x: str, seen: str) -> str:
        q, k, v = (self.by_heads(x, heads) for heads in (self.heads, self.kv_heads, self.kv_heads))
        if self.draw.random() < 0.5:
            places = self.places()
            q, k = self.turned(q, places), self.turned(k, places)
            self.said.append("rotary")
        keys, values = (
            self.op("Concat", f"past_key_values.{layer}.{role}", new, output=f"present.{layer}.{role}",
                    axis=self.draw.choice([2, -2]))
            for role, new in (("key", k), ("value", v))
        )  # fmt: skip
        keys, values = self.repeated(keys), self.repeated(values)
        scale = self.size**-0.5
        kt = self.op("Transpose", keys, perm=[0, 1, 3, 2])
        number, root = self.constant(scale, self.kind), self.constant(scale**0.5, self.kind)
        scores = self.pick(
            after=lambda: self.op("Mul", self.op("MatMul", q, kt), number),
            divided=lambda: self.op("Div", self.op("MatMul", q, kt), self.constant(1 / scale, self.kind)),
            before=lambda: self.op("MatMul", self.op("Mul", q, number), kt),
            both=lambda: self.op("MatMul", self.op("Mul", q, root), self.op("Mul", kt, root)),
            einsum=lambda: self.op("Mul", self.op("Einsum", q, keys, equation="bhsd,bhtd->bhst"), number),
        )
        masked = self.masked(scores, seen)
        p = self.pick(
            plain=lambda: self.op("Softmax", masked, axis=-1),
            cast=lambda: self.op("Cast", self.op("Softmax", self.op("Cast", masked, to=TensorProto.FLOAT), axis=-1),
                                 to=self.kind),
        )  # fmt: skip
        y = self.op("Transpose", self.op("MatMul", p, values), perm=[0, 2, 1, 3])
        flat = self.op("Reshape", y, self.constant([0, 0, self.width]))
        return self.op("Add", x, self.op("MatMul", flat, self.weight(self.width, self.width)))


def difference(drawn: Decoder, before: onnx.ModelProto, fused: onnx.ModelProto) -> float:
    """The largest one between uneven sentences side by side and each by itself, of what is largest."""
    draw, float_ = np.random.default_rng(3), helper.tensor_dtype_to_np_dtype(drawn.kind)
    batch = drawn.batch or 4
    counts = np.minimum(COUNTS[:batch], drawn.slots or 9)
    lengths, slots = np.array(LENGTHS[:batch]), drawn.slots or counts.max()
    x = 100 * draw.standard_normal((batch, slots, drawn.width)).astype(float_)
    for b, count in enumerate(counts):
        x[b, :count] = draw.standard_normal((count, drawn.width))
    names = [value.name for value in before.graph.input if value.name.startswith("past_")]
    shape = (drawn.kv_heads, CAPACITY, drawn.size)
    pasts = {name: draw.standard_normal((batch, *shape)).astype(float_) for name in names}
    caches = {name: np.full((batch, *shape), np.nan, float_) for name in names}
    for b, n in enumerate(lengths):
        for name in names:
            caches[name][b, :, :n] = pasts[name][b, :, :n]
    runs = [session(fused, library=library) for library in ((False, True) if has_library() else (False,))]
    got = [one.run(None, {"inputs_embeds": x, "cache_lengths": lengths, **caches}) for one in runs]
    worst, original = 0.0, session(before, library=False)
    given = {value.name for value in before.graph.input}
    for b, (count, n) in enumerate(zip(counts, lengths, strict=True)):
        rows, times = drawn.slots or count, drawn.batch or 1
        alone = np.zeros((1, rows, drawn.width), float_)
        alone[0, :count] = x[b, :count]
        feeds = {"inputs_embeds": alone, "attention_mask": np.ones((1, n + rows), np.int64)}
        feeds |= {name: pasts[name][b : b + 1, :, :n] for name in names}
        feeds = {name: np.repeat(value, times, axis=0) for name, value in feeds.items() if name in given}
        for name in given & {"position_ids", "cache_position"}:
            positions = n + np.arange(rows)
            many = times if drawn.positions and drawn.positions[0] != 1 else 1
            feeds[name] = positions if name == "cache_position" else np.repeat(positions[None], many, axis=0)
        want = original.run(None, feeds)
        for found in got:
            worst = max(worst, _off(found[0][b, :count], want[0][-1, :count]))
            for a, e in zip(found[1:], want[1:], strict=True):
                worst = max(worst, _off(a[b, :, : n + count], e[-1, :, : n + count]))
    return worst


def _off(got: np.ndarray, want: np.ndarray) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    off = np.abs(got - want).max() / max(1, np.abs(want).max())
    return float(np.inf if np.isnan(off) else off)


def check(seed: int, counts: collections.Counter[str], folder: Path | None = None) -> None:
    """Fuses one, through a file with its weights beside it where there is a folder."""
    drawn = Decoder(seed)
    onnx.checker.check_model(drawn.model, full_check=True)
    source: Any = drawn.model
    if folder is not None:
        source = folder / "decoder.onnx"
        options = {"save_as_external_data": True, "location": "decoder.data", "size_threshold": 0}
        onnx.save_model(drawn.model, source, **options)
        drawn.model = onnx.load(source)
    try:
        fused, _ = fuse(source, kv_cache="static")
    except ValueError as error:
        assert "kv_cache: " in str(error), error
        counts[str(error)[17:120]] += 1
        return
    counts["taken"] += 1
    if folder is not None:
        fuse(source, folder / "fused.onnx", kv_cache="static")
        fused = onnx.load(folder / "fused.onnx")
    limit = 2e-2 if drawn.kind == TensorProto.FLOAT16 else 1e-4
    off = difference(drawn, drawn.model, fused)
    assert off < limit, f"off by {off}: {drawn.said}"


@pytest.mark.parametrize("part", range(4))
def test_caches(part: int, tmp_path: Path) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(6 * part, 6 * part + 6):
        check(seed, counts, tmp_path if seed % 6 == 0 else None)
    assert counts["taken"] >= 2, counts


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_caches_of_many(part: int) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        check(seed, counts)
    assert counts["taken"] >= 50, counts


@pytest.mark.parametrize("seed", range(12))
def test_fused_as_it_is(seed: int) -> None:
    """Without caches all of them are fused, at every opset, also where a sentence is padded on the left."""
    drawn = Decoder(seed)
    fused, report = fuse(drawn.model)
    assert report.fused == report.total > 0, str(report)
    onnx.checker.check_model(fused, full_check=True)
    draw, float_ = np.random.default_rng(3), helper.tensor_dtype_to_np_dtype(drawn.kind)
    batch, slots, n = drawn.batch or 3, drawn.slots or 5, 4
    positions = n + np.arange(slots)
    feeds = {"inputs_embeds": draw.standard_normal((batch, slots, drawn.width)), "cache_position": positions}
    feeds["attention_mask"] = (np.arange(n + slots) >= np.arange(batch)[:, None] % 4).astype(np.int64)
    feeds["position_ids"] = np.repeat(positions[None], batch if drawn.positions and drawn.positions[0] != 1 else 1, 0)
    for value in drawn.model.graph.input:
        if value.name.startswith("past_"):
            feeds[value.name] = draw.standard_normal((batch, drawn.kv_heads, n, drawn.size))
    given = {v.name: v.type.tensor_type.elem_type for v in drawn.model.graph.input}
    feeds = {name: feeds[name].astype(helper.tensor_dtype_to_np_dtype(kind)) for name, kind in given.items()}
    want = session(drawn.model).run(None, feeds)
    limit = 2e-2 if float_ == np.float16 else 1e-4
    for library in (False, True) if has_library() else (False,):
        for a, e in zip(session(fused, library=library).run(None, feeds), want, strict=True):
            seen = ~np.isnan(e)
            assert _off(np.where(seen, a, 0), np.where(seen, e, 0)) < limit, drawn.said
