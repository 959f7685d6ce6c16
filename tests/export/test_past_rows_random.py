"""fuse(kv_cache=...) on random graphs: an output that is taken gives each sentence what it gets by itself."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import run

BATCH, SLOTS, CAPACITY = 4, 5, 16
COUNTS, LENGTHS = np.array([5, 2, 1, 4]), np.array([3, 0, 7, 2])
Axis = tuple[Any, ...]  # "b", "s" and numbers, whose product is its size; "w" is 1 before and the batch afterwards


class Drawn:
    """A random graph beside a decoder: what it makes of tokens and positions is output `z`.

    Attributes:
        lines: its nodes.
        values: what there is, with the axes of each.
    """

    def __init__(self, seed: int, fixed: dict[str, int]) -> None:
        self.draw, self.fixed, self.lines, self.count = random.Random(seed), fixed, list[str](), 0
        self.values: dict[str, tuple[Axis, ...]] = {
            "x": (("b",), ("s",), (8,)), "pos": (("b",), ("s",)), "w8": ((8,),), "w48": ((4,), (8,)),
            "w4": ((4,), (), ()), "w5": ((5,), ()), "from0": (("s",),), "n_s": (), "ahead": (("w",), ("s",)),
            "w4448": ((4,), (4,), (4,), (8,)),
        }  # fmt: skip
        steps = [self.unary, self.binary, self.binary, self.binary, self.transpose, self.reshape, self.along,
                 self.reduce, self.matmul, self.part, self.expand, self.unsqueeze, self.join, self.look_up]  # fmt: skip
        while len(self.values) < 10 + self.draw.randint(2, 7):
            self.draw.choice(steps)()
        self.result = list(self.values)[-1]

    def pick(self) -> str:
        """Mostly what came last."""
        names = list(self.values)
        return self.draw.choice(names if self.draw.random() < 0.4 else [*names[:2], "ahead", *names[10:]])

    def add(self, line: str, axes: Any, *, before: str = "") -> None:
        name = f"v{self.count}"
        self.count += 1
        self.lines.append(before.format(o=name) + f" {name} = {line}")
        self.values[name] = tuple(tuple(item for item in axis if item != 1) for axis in axes)

    def number(self, axis: Axis) -> int | None:
        sizes = [self.fixed.get(item, item) if isinstance(item, str) else item for item in axis]
        return None if any(isinstance(size, str) for size in sizes) else math.prod(sizes)

    def shape(self, axes: list[Axis]) -> str:
        """Nodes that make {o}n, a shape tensor."""
        parts, ends = [], []
        for index, axis in enumerate(axes):
            number = math.prod(item for item in axis if not isinstance(item, str))
            parts.append(f"{{o}}p{index} = Constant<value_ints=[{number}]>()")
            ends.append(f"{{o}}p{index}")
            for name in (item for item in axis if item in ("b", "s")):
                ends[index], last = f"{{o}}r{index}{name}", ends[index]
                parts.append(f"{ends[index]} = Mul({last}, size_{name})")
        return " ".join(parts) + f" {{o}}n = Concat<axis=0>({', '.join(ends)})"

    def unary(self) -> None:
        name = self.pick()
        self.add(f"{self.draw.choice(['Sin', 'Tanh', 'Neg', 'Identity'])}({name})", self.values[name])

    def met(self, a: tuple[Axis, ...], b: tuple[Axis, ...]) -> list[Axis] | None:
        made = []
        for place in range(-max(len(a), len(b)), 0):
            x, y = (axes[place] if len(axes) >= -place else () for axes in (a, b))
            if ("w",) in (x, y):
                made.append((x if y == ("w",) else y) or ("w",))
                continue
            if x and y and x != y and (self.number(x) is None or self.number(x) != self.number(y)):
                return None
            made.append(x if x and (not y or any(isinstance(item, str) for item in x)) else y)
        return made

    def binary(self) -> None:
        a, b = self.pick(), self.pick()
        axes = self.met(self.values[a], self.values[b])
        if axes is not None:
            self.add(f"{self.draw.choice(['Add', 'Mul', 'Sub'])}({a}, {b})", axes)

    def matmul(self) -> None:
        a, b = self.pick(), self.pick()
        x, y = self.values[a], self.values[b]
        if min(len(x), len(y)) > 1 and x[-1] == y[-2] and (batch := self.met(x[:-2], y[:-2])) is not None:
            self.add(f"MatMul({a}, {b})", [*batch, x[-2], y[-1]])

    def transpose(self) -> None:
        name = self.pick()
        perm = self.draw.sample(range(len(self.values[name])), len(self.values[name]))
        if perm:
            self.add(f"Transpose<perm={perm}>({name})", [self.values[name][i] for i in perm])

    def reshape(self) -> None:
        name = self.pick()
        items = [item for axis in self.values[name] for item in (axis or (1,))]
        items = [
            part
            for item in items
            for part in ((4, item // 4) if item in (8, 32) and self.draw.random() < 0.5 else (item,))
        ]
        axes: list[Axis] = []
        for item in items:
            if axes and self.draw.random() < 0.4:
                axes[-1] = (*axes[-1], item)
            else:
                axes.append((item,))
        if axes:
            self.add(f"Reshape({name}, v{self.count}n)", axes, before=self.shape(axes))

    def place(self, name: str) -> int | None:
        return self.draw.randrange(len(self.values[name])) if self.values[name] else None

    def along(self) -> None:
        name = self.pick()
        if (place := self.place(name)) is not None:
            made = self.draw.choice([f"Softmax<axis={place}>({name})", f"CumSum({name}, i{place})",
                                     f"CumSum<reverse=1>({name}, i{place})"])  # fmt: skip
            self.add(made, self.values[name])

    def reduce(self) -> None:
        name = self.pick()
        if (place := self.place(name)) is not None:
            keep, axes = self.draw.randint(0, 1), list(self.values[name])
            axes[place : place + 1] = [()] * keep
            op = self.draw.choice(["ReduceSum", "ReduceMax"])
            self.add(f"{op}<keepdims={keep}>({name}, k{place})", axes)

    def part(self) -> None:
        name = self.pick()
        place = self.place(name)
        if place is None or not self.values[name][place]:
            return
        axes = list(self.values[name])
        if self.draw.random() < 0.5:
            axes[place] = ()
            self.add(f"Slice({name}, {self.draw.choice(['k0, k1', 'minus, big'])}, k{place})", axes)
        else:
            start, end, step = self.draw.choice([("k0", "big", "k1"), ("minus", "small", "minus")])
            self.add(f"Slice({name}, {start}, {end}, k{place}, {step})", axes)

    def expand(self) -> None:
        name = self.pick()
        axes = [axis or self.draw.choice([("b",), ("s",), (4,), ()]) for axis in self.values[name]]
        if axes:
            self.add(f"Expand({name}, v{self.count}n)", axes, before=self.shape(axes))

    def unsqueeze(self) -> None:
        name = self.pick()
        if len(self.values[name]) < 4:
            axes = list(self.values[name])
            place = self.draw.randint(0, len(axes))
            axes.insert(place, ())
            self.add(f"Unsqueeze({name}, k{place})", axes)

    def join(self) -> None:
        name = self.pick()
        place = self.place(name)
        if place is not None and all(not isinstance(item, str) for item in self.values[name][place]):
            axes = list(self.values[name])
            axes[place] = (2, *axes[place])
            self.add(f"Concat<axis={place}>({name}, {name})", axes)

    def look_up(self) -> None:
        name = self.pick()
        place = self.place(name)
        if (
            place is not None
            and all(not isinstance(item, str) for item in self.values[name][place])
            and self.values[name][place]
        ):
            axes = [*self.values[name][:place], *self.values["pos"], *self.values[name][place + 1 :]]
            if len(axes) < 6:
                self.add(f"Gather<axis={place}>({name}, low)", axes)

    def model(self) -> onnx.ModelProto:
        b, s = (self.fixed.get(name, name) for name in "bs")
        rank = ",".join(f"u{self.count}_{i}" for i in range(len(self.values[self.result])))
        kind = f"float[{rank}]" if rank else "float[]"
        model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 23]>
        g (float[{b},{s},8] x, int64[{b},{s}] position_ids, float[{b},4,p,2] pk, float[{b},4,p,2] pv)
          => (float[{b},{s},8] y, {kind} z, float[{b},4,t,2] prk, float[{b},4,t,2] prv)
        <int64[1] k0 = {{0}}, int64[1] k1 = {{1}}, int64[1] k2 = {{2}}, int64[1] k3 = {{3}}, int64[1] k4 = {{4}},
         int64[1] k5 = {{5}}, int64 i0 = {{0}}, int64 i1 = {{1}}, int64 i2 = {{2}}, int64 i3 = {{3}}, int64 i4 = {{4}},
         int64 i5 = {{5}}, int64[1] minus = {{-1}}, int64[1] big = {{9223372036854775807}},
         int64[1] small = {{-9223372036854775807}}, int64 two = {{2}}, float half = {{0.5}}> {{
        size_b = Shape<start=0,end=1>(x) size_s = Shape<start=1,end=2>(x) n = Squeeze(size_s) n_s = Cast<to=1>(n)
        pf = Cast<to=1>(position_ids) pos = Mul(pf, half) low = Mod(position_ids, two)
        r = Range(i0, n, i1) from0 = Cast<to=1>(r)
        size_p = Shape<start=2,end=3>(pk) n_p = Squeeze(size_p) n_t = Add(n_p, n) a = Range(n_p, n_t, i1)
        af = Cast<to=1>(a) ahead = Unsqueeze(af, k0) {" ".join(self.lines)}
        y, prk, prv = Attention<is_causal=1,q_num_heads=4,kv_num_heads=4>(x,x,x,,pk,pv) z = Identity({self.result})
        }}""")
        draw = np.random.default_rng(7)
        for name, axes in self.values.items():
            if name.startswith("w"):
                values = draw.standard_normal([math.prod(axis) for axis in axes]).astype(np.float32)
                model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
        return model

    def cut(self, z: np.ndarray, sizes: dict[str, int], which: int, count: int) -> np.ndarray:
        """Of z sentence `which` and its first tokens."""
        items = [item for axis in self.values[self.result] for item in axis]
        z = z.reshape([sizes.get(item, item) for item in items])
        index = {name: min(which, sizes[name] - 1) for name in "bw"} | {"s": slice(count)}
        return z[tuple(index.get(item, slice(None)) for item in items)]


def difference(drawn: Drawn, before: onnx.ModelProto, fused: onnx.ModelProto) -> float:
    """The largest one between sentences side by side, large numbers in their padding, and each by itself."""
    draw = np.random.default_rng(3)
    x = 1e3 * draw.standard_normal((BATCH, SLOTS, 8)).astype(np.float32)
    for b, count in enumerate(COUNTS):
        x[b, :count] = draw.standard_normal((count, 8))
    caches = {value.name: np.zeros((BATCH, 4, CAPACITY, 2), np.float32) for value in fused.graph.input
              if value.name.startswith("past_")}  # fmt: skip
    got = run(fused, {"x": x, "cache_lengths": LENGTHS, **caches})[1]
    worst = 0.0
    for b, (count, n) in enumerate(zip(COUNTS, LENGTHS, strict=True)):
        slots, times = SLOTS if "s" in drawn.fixed else count, drawn.fixed.get("b", 1)
        alone = np.concatenate([x[b : b + 1, :count], np.zeros((1, slots - count, 8), np.float32)], axis=1)
        given = {"x": alone, "position_ids": n + np.arange(slots)[None]}
        given |= {name: np.zeros((1, 4, n, 2), np.float32) for name in ("pk", "pv")}
        want = run(before, {name: np.repeat(value, times, axis=0) for name, value in given.items()})[1]
        mine = drawn.cut(got, {"b": BATCH, "w": BATCH, "s": SLOTS}, b, count)
        other = drawn.cut(want, {"b": times, "w": 1, "s": slots}, b, count)
        with np.errstate(all="ignore"):
            off = np.abs(mine - other).max() / max(1, np.abs(other).max())
        worst = max(worst, float(np.inf if np.isnan(off) else off))
    return worst


SIZES: dict[str, dict[str, int]] = {
    "dynamic": {}, "fixed batch": {"b": BATCH}, "fixed tokens": {"s": SLOTS}, "fixed": {"b": BATCH, "s": SLOTS},
}  # fmt: skip


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 60))])
@pytest.mark.parametrize("sizes", SIZES)
def test_taken_is_right(sizes: str, seed: int) -> None:
    drawn = Drawn(seed, SIZES[sizes])
    before = drawn.model()
    try:
        fused, _ = fuse(before, kv_cache="static")
    except ValueError as error:
        assert "kv_cache: " in str(error)
        return
    assert difference(drawn, before, fused) < 1e-4
